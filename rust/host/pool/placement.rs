//! Which CPUs the workers of a pool are pinned to: a pure function of the topology, the allowed
//! set, the request and the rank.
//!
//! The order of CPUs: the first hardware thread of every core, then the second of every core and so
//! on; among those performance cores before efficiency cores; among those node by node, the nearest
//! to the rank's GPU first, then by number. A pool takes the first `n` of this order, so
//! neighbouring workers (which hold neighbouring shares of a job) sit on one node, and fewer
//! workers than cores fill one node before the next.
//!
//! Ranks that share a host split the *cores*. A core's hardware threads stay together.
//!
//! - PLACE-1 Where there are as many cores as ranks, each core is one rank's, and each rank has one
//!   at least. Where there are fewer, ranks share cores.
//! - PLACE-2 Where the nodes of all ranks' GPUs are known, the ranks whose GPUs share a node share
//!   its cores. A node that no rank's GPU hangs on is shared by the ranks that are nearest to it.
//!   A rank whose node has no core left for it is on the nearest node that has one.
//! - PLACE-3 Where they are not known, all ranks share all nodes: neighbouring cores are together.
//! - PLACE-4 Ranks that share cores have as many each, but for one, and each kind in proportion.

use std::collections::{BTreeMap, HashSet};

use super::PoolConfig;
use crate::host::environment::RankShare;
use crate::host::topology::{CoreKind, Topology, format_cpu_list};
use crate::{Error, Result};

/// Above this a thread count is a mistake rather than a wish.
const THREADS_MAX: usize = 4096;

/// The CPU of each worker, in worker order.
///
/// An explicit list is taken as it is. More threads than CPUs wrap around: several workers share a
/// CPU. `gpu_nodes` has the node of each rank's GPU; empty where they are not known.
///
/// # Errors
/// [`Error::Value`] for a count of 0 or beyond any machine, a list that is empty, repeats a CPU or
/// leaves the allowed set, a count that contradicts the list, an empty allowed set, or a rank that
/// is not below the number of ranks.
pub fn choose_cpus(
    topology: &Topology,
    allowed: &[usize],
    config: &PoolConfig,
    share: RankShare,
    gpu_nodes: &[usize],
) -> Result<Vec<usize>> {
    if allowed.is_empty() {
        return Err(Error::value("this process is allowed on no CPU"));
    }
    if let Some(threads) = config.threads.filter(|&threads| threads == 0 || threads > THREADS_MAX) {
        return Err(Error::value(format!(
            "invalid number of threads `{threads}`, expected 1 to {THREADS_MAX}; hint: leave it \
             out for one per physical core"
        )));
    }
    if let Some(cpus) = &config.cpus {
        return check_cpus(cpus, allowed, config.threads);
    }
    if share.rank >= share.num_ranks {
        return Err(Error::value(format!(
            "local rank `{}` is not below the local world size `{}`; hint: LOCAL_RANK and \
             LOCAL_WORLD_SIZE are set by the launcher",
            share.rank, share.num_ranks
        )));
    }
    let cores = rank_cores(topology, cores_of(topology, allowed), share, gpu_nodes);
    let order = hardware_threads_in_order(&cores);
    let threads = config.threads.unwrap_or(cores.len());
    Ok(order.iter().copied().cycle().take(threads).collect())
}

fn check_cpus(cpus: &[usize], allowed: &[usize], threads: Option<usize>) -> Result<Vec<usize>> {
    if cpus.is_empty() {
        return Err(Error::value(
            "empty list of CPUs, expected at least one; hint: leave it out for one per physical \
             core",
        ));
    }
    if let Some(threads) = threads.filter(|&threads| threads != cpus.len()) {
        return Err(Error::value(format!(
            "`{threads}` threads given with `{}` CPUs; hint: give one of the two",
            cpus.len()
        )));
    }
    let mut seen = HashSet::new();
    for &cpu in cpus {
        if !allowed.contains(&cpu) {
            return Err(Error::value(format!(
                "CPU `{cpu}` is not among those this process may use, `{}`; hint: see `taskset -p` \
                 and the container's cpuset",
                format_cpu_list(allowed)
            )));
        }
        if !seen.insert(cpu) {
            return Err(Error::value(format!(
                "CPU `{cpu}` stands twice in the list, expected each once"
            )));
        }
    }
    Ok(cpus.to_vec())
}

/// The allowed hardware threads of one core.
struct Core {
    kind: CoreKind,
    node: usize,
    cpus: Vec<usize>,
}

/// The allowed cores.
fn cores_of(topology: &Topology, allowed: &[usize]) -> Vec<Core> {
    let mut cores: BTreeMap<usize, Core> = BTreeMap::new();
    let mut allowed = allowed.to_vec();
    allowed.sort_unstable();
    allowed.dedup();
    for cpu in allowed.into_iter().map(|id| topology.cpu(id)) {
        let core = cores.entry(cpu.core).or_insert_with(|| Core {
            kind: cpu.kind,
            node: cpu.node,
            cpus: Vec::new(),
        });
        core.cpus.push(cpu.id);
    }
    cores.into_values().collect()
}

/// The cores of one rank, in the order of the module.
fn rank_cores(
    topology: &Topology,
    mut cores: Vec<Core>,
    share: RankShare,
    gpu_nodes: &[usize],
) -> Vec<Core> {
    let key = |core: &Core| (core.kind, core.node, core.cpus[0]);
    cores.sort_by_key(key);
    let Some(homes) = homes(topology, &cores, share.num_ranks, gpu_nodes) else {
        let mut mine = piece(cores, share.rank, share.num_ranks, 1);
        mine.sort_by_key(key);
        return mine;
    };
    let mut of_nodes: BTreeMap<usize, Vec<Core>> = BTreeMap::new();
    for core in cores {
        of_nodes.entry(core.node).or_default().push(core);
    }
    let mut mine = Vec::new();
    for (node, cores) in of_nodes {
        let ranks = ranks_of_node(topology, &homes, node);
        if let Some(index) = ranks.iter().position(|&rank| rank == share.rank) {
            mine.extend(piece(cores, index, ranks.len(), 0));
        }
    }
    let home = homes[share.rank];
    mine.sort_by_key(|core| (core.kind, distance(topology, home, core.node), key(core)));
    mine
}

/// The node that each rank has a core of, at least: its GPU's, or else the nearest that has one
/// left. None where GPUs are not known, or there are more ranks than cores.
fn homes(
    topology: &Topology,
    cores: &[Core],
    num_ranks: usize,
    gpu_nodes: &[usize],
) -> Option<Vec<usize>> {
    if gpu_nodes.len() != num_ranks || cores.len() < num_ranks {
        return None;
    }
    let mut left: BTreeMap<usize, usize> = BTreeMap::new();
    for core in cores {
        *left.entry(core.node).or_default() += 1;
    }
    // Ranks that find a core on their GPU's node go first.
    let mut homes: Vec<Option<usize>> = gpu_nodes
        .iter()
        .map(|node| {
            let left = left.get_mut(node).filter(|left| **left > 0)?;
            *left -= 1;
            Some(*node)
        })
        .collect();
    for (home, &wanted) in homes.iter_mut().zip(gpu_nodes).filter(|(home, _)| home.is_none()) {
        let nearest = left
            .iter_mut()
            .filter(|(_, left)| **left > 0)
            .min_by_key(|(node, _)| (distance(topology, wanted, **node), **node));
        *home = nearest.map(|(node, left)| {
            *left -= 1;
            *node
        });
    }
    homes.into_iter().collect()
}

/// The ranks that share the cores of a node, ascending: those at home there, or else the nearest.
fn ranks_of_node(topology: &Topology, homes: &[usize], node: usize) -> Vec<usize> {
    let distances: Vec<u64> = homes.iter().map(|&home| distance(topology, home, node)).collect();
    let least = distances.iter().min();
    (0..homes.len()).filter(|&rank| Some(&distances[rank]) == least).collect()
}

/// No node is as near as the same, whatever the firmware says.
fn distance(topology: &Topology, from: usize, to: usize) -> u64 {
    if from == to { 0 } else { topology.distance(from, to).saturating_add(1) }
}

/// The piece at `index` of `count` that `cores` are cut into, of `len_min` cores at least. They are
/// in the order of kinds.
fn piece(cores: Vec<Core>, index: usize, count: usize, len_min: usize) -> Vec<Core> {
    let num_cores = cores.len();
    // Both kinds spread evenly over one line, which is then cut into pieces: each has its part of
    // each kind.
    let count_of = |kind| cores.iter().filter(|core| core.kind == kind).count();
    let counts = [count_of(CoreKind::Performance), count_of(CoreKind::Efficiency)];
    let mut next = [0, 0];
    let mut line: Vec<(f64, Core)> = cores
        .into_iter()
        .map(|core| {
            let kind = core.kind as usize;
            next[kind] += 1;
            ((next[kind] as f64 - 0.5) / counts[kind] as f64, core)
        })
        .collect();
    line.sort_by(|a, b| a.0.total_cmp(&b.0));

    let begin = index * num_cores / count;
    let end = ((index + 1) * num_cores / count).max(begin + len_min);
    line.drain(begin..end).map(|(_, core)| core).collect()
}

/// Every core's first hardware thread, then every core's second, ...
fn hardware_threads_in_order(cores: &[Core]) -> Vec<usize> {
    let rounds = cores.iter().map(|core| core.cpus.len()).max().unwrap_or(0);
    (0..rounds)
        .flat_map(|round| cores.iter().filter_map(move |core| core.cpus.get(round).copied()))
        .collect()
}
