//! Which CPUs the workers of a pool are pinned to: a pure function of the topology, the allowed
//! set, the request and the rank.
//!
//! The order of CPUs: the first hardware thread of every core, then the second of every core and so
//! on; among those performance cores before efficiency cores; among those node by node, then by
//! number. A pool takes the first `n` of this order, so neighbouring workers (which hold
//! neighbouring shares of a job) sit on one node, and fewer workers than cores fill one node before
//! the next.
//!
//! Ranks that share a host split the *cores*: each kind in proportion, neighbouring cores together,
//! every rank at least one. A core's hardware threads stay together.

use std::collections::{BTreeMap, HashSet};

use super::PoolConfig;
use crate::host::topology::{CoreKind, Topology, format_cpu_list};
use crate::{Error, Result};

/// Above this a thread count is a mistake rather than a wish.
const THREADS_MAX: usize = 4096;

/// The part of the allowed cores that falls to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankShare {
    /// This process among those that share the host, from 0.
    pub rank: usize,
    /// How many processes share the host.
    pub num_ranks: usize,
}

impl RankShare {
    /// All of it: no other rank on this host.
    pub const WHOLE: Self = Self { rank: 0, num_ranks: 1 };
}

/// The CPU of each worker, in worker order.
///
/// An explicit list is taken as it is. More threads than CPUs wrap around: several workers share a
/// CPU.
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
    let cores = rank_cores(cores_in_order(topology, allowed), share);
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

/// Performance before efficiency, node by node, by number.
fn cores_in_order(topology: &Topology, allowed: &[usize]) -> Vec<Core> {
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
    let mut cores: Vec<Core> = cores.into_values().collect();
    cores.sort_by_key(|core| (core.kind, core.node, core.cpus[0]));
    cores
}

/// The cores of one rank, in the same order.
fn rank_cores(cores: Vec<Core>, share: RankShare) -> Vec<Core> {
    let num_cores = cores.len();
    // Both kinds spread evenly over one line, which is then cut into pieces: every rank gets its
    // part of each kind.
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

    let begin = share.rank * num_cores / share.num_ranks;
    let end = ((share.rank + 1) * num_cores / share.num_ranks).max(begin + 1);
    let mut mine: Vec<Core> = line.drain(begin..end).map(|(_, core)| core).collect();
    mine.sort_by_key(|core| (core.kind, core.node, core.cpus[0]));
    mine
}

/// Every core's first hardware thread, then every core's second, ...
fn hardware_threads_in_order(cores: &[Core]) -> Vec<usize> {
    let rounds = cores.iter().map(|core| core.cpus.len()).max().unwrap_or(0);
    (0..rounds)
        .flat_map(|round| cores.iter().filter_map(move |core| core.cpus.get(round).copied()))
        .collect()
}
