//! The machine from `/sys` fixtures, and which CPUs a pool takes of it.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use stepwell::Error;
use stepwell::host::environment::RankShare;
use stepwell::host::pool::{PoolConfig, choose_cpus};
use stepwell::host::topology::{CoreKind, Topology, format_cpu_list, parse_cpu_list};
use tempfile::TempDir;

/// A `/sys` made of files.
struct Fixture(TempDir);

impl Fixture {
    fn new(files: &[(&str, &str)]) -> Self {
        let fixture = Self(TempDir::new().expect("folder"));
        files.iter().for_each(|(path, text)| fixture.file(path, text));
        fixture
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join("sys").join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
        fs::write(path, format!("{text}\n")).expect("file");
    }

    fn cpu_file(&self, cpu: usize, file: &str, text: &str) {
        self.file(&format!("devices/system/cpu/cpu{cpu}/{file}"), text);
    }

    fn read(&self) -> Topology {
        Topology::read(self.0.path())
    }
}

fn kinds(topology: &Topology) -> Vec<CoreKind> {
    topology.cpus().map(|cpu| cpu.kind).collect()
}

fn choose(topology: &Topology, allowed: &[usize], threads: Option<usize>) -> Vec<usize> {
    choose_cpus(
        topology,
        allowed,
        &PoolConfig { threads, ..PoolConfig::default() },
        RankShare::WHOLE,
        &[],
    )
    .expect("CPUs")
}

/// Two nodes of two cores with two hardware threads each, numbered as servers do: siblings are 4
/// apart, nodes alternate.
fn server() -> Fixture {
    let fixture = Fixture::new(&[
        ("devices/system/cpu/online", "0-7"),
        ("devices/system/cpu/isolated", ""),
        ("devices/system/node/node0/cpulist", "0,2,4,6"),
        ("devices/system/node/node1/cpulist", "1,3,5,7"),
        ("devices/system/node/node2/cpulist", ""),
        ("bus/pci/devices/0000:3b:00.0/class", "0x030200"),
        ("bus/pci/devices/0000:3b:00.0/numa_node", "1"),
        ("bus/pci/devices/0000:5e:00.0/class", "0x120000"),
        ("bus/pci/devices/0000:5e:00.0/numa_node", "-1"),
        ("bus/pci/devices/0000:00:1f.6/class", "0x020000"),
        ("bus/pci/devices/0000:00:1f.6/numa_node", "0"),
        ("class/nvme/nvme0/numa_node", "0"),
        ("class/nvme/nvme1/device/numa_node", "1"),
        ("class/nvme/nvme11/address", "0000:01:00.0"),
    ]);
    for cpu in 0..8 {
        fixture.cpu_file(cpu, "topology/core_cpus_list", &format!("{},{}", cpu % 4, cpu % 4 + 4));
    }
    fixture
}

#[test]
fn a_server_with_two_nodes() {
    let topology = server().read();
    assert_eq!(topology.cpus().len(), 8);
    assert_eq!(topology.nodes(), [0, 1, 2]);
    for cpu in topology.cpus() {
        assert_eq!((cpu.core, cpu.node, cpu.kind), (cpu.id % 4, cpu.id % 2, CoreKind::Performance));
    }
    let all: Vec<usize> = (0..8).collect();
    assert_eq!(choose(&topology, &all, None), [0, 2, 1, 3], "one per core, node by node");
    assert_eq!(choose(&topology, &all, Some(3)), [0, 2, 1]);
    assert_eq!(
        choose(&topology, &all, Some(6)),
        [0, 2, 1, 3, 4, 6],
        "then the second hardware threads"
    );
    assert_eq!(choose(&topology, &[7, 3, 4], None), [4, 3], "the allowed ones only");
    assert_eq!(choose(&topology, &[5], Some(3)), [5, 5, 5]);
}

#[test]
fn devices_and_their_nodes() {
    let topology = server().read();
    assert_eq!(
        topology.gpus().iter().map(|gpu| gpu.name.as_str()).collect::<Vec<_>>(),
        ["0000:3b:00.0", "0000:5e:00.0"]
    );
    for address in ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0"] {
        assert_eq!(topology.node_of_gpu(address), Some(1), "{address}");
    }
    for address in ["0000:5e:00.0", "0000:00:1f.6", "0001:3b:00.0", ""] {
        assert_eq!(topology.node_of_gpu(address), None, "{address}");
    }
    for (drive, node) in [
        ("nvme0", Some(0)),
        ("nvme0n1", Some(0)),
        ("nvme1n1p2", Some(1)),
        ("nvme11n1", None),
        ("sda", None),
        ("nvme", None),
    ] {
        assert_eq!(topology.node_of_drive(drive), node, "{drive}");
    }
}

/// The cores of each rank, whose GPUs hang on these nodes.
fn shares(topology: &Topology, allowed: &[usize], gpu_nodes: &[usize]) -> Vec<Vec<usize>> {
    let num_ranks = gpu_nodes.len();
    (0..num_ranks)
        .map(|rank| {
            let share = RankShare { rank, num_ranks };
            choose_cpus(topology, allowed, &PoolConfig::default(), share, gpu_nodes).expect("CPUs")
        })
        .collect()
}

#[test]
fn ranks_have_cores_near_their_gpus() {
    let topology = server().read();
    let all: Vec<usize> = (0..8).collect();
    // Cores 0 and 2 are on node 0, 1 and 3 on node 1.
    assert_eq!(shares(&topology, &all, &[1, 0]), [[1, 3], [0, 2]]);
    assert_eq!(shares(&topology, &all, &[1, 1]), [[1, 0], [3, 2]], "no rank is on node 0");
    assert_eq!(shares(&topology, &all, &[1, 0, 1]), [vec![1], vec![0, 2], vec![3]]);
    assert_eq!(shares(&topology, &all, &[1]), [[1, 3, 0, 2]], "its own node first");
    assert_eq!(shares(&topology, &all, &[1, 1, 1]), [vec![1], vec![3], vec![0, 2]]);
    assert_eq!(shares(&topology, &all, &[2, 1]), [[0, 2], [1, 3]], "node 2 has no cores");
    assert_eq!(shares(&topology, &[0, 2, 4], &[1, 1]), [[0], [2]], "nor has node 1 here");
    // More ranks than cores: as without GPUs.
    assert_eq!(shares(&topology, &[1, 3], &[0, 1, 1]), [[1], [1], [3]]);
}

#[test]
fn a_node_without_a_gpu_is_shared_by_the_nearest_ranks() {
    // Two sockets of two nodes; the GPUs hang on the second node of each.
    let fixture = Fixture::new(&[("devices/system/cpu/online", "0-7")]);
    for (node, distances) in
        ["10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"].iter().enumerate()
    {
        let folder = format!("devices/system/node/node{node}");
        fixture.file(&format!("{folder}/cpulist"), &format!("{}-{}", 2 * node, 2 * node + 1));
        fixture.file(&format!("{folder}/distance"), distances);
    }
    let topology = fixture.read();
    assert_eq!((topology.distance(0, 1), topology.distance(1, 2)), (12, 32));
    let all: Vec<usize> = (0..8).collect();
    assert_eq!(shares(&topology, &all, &[3, 1]), [[6, 7, 4, 5], [2, 3, 0, 1]]);
    assert_eq!(shares(&topology, &all, &[3, 3, 1, 1]), [[6, 4], [7, 5], [2, 0], [3, 1]]);
    assert_eq!(shares(&topology, &all, &[3]), [[6, 7, 4, 5, 0, 1, 2, 3]]);
    // A list of another length is none.
    fixture.file("devices/system/node/node0/distance", "10 12");
    let topology = fixture.read();
    assert_eq!((topology.distance(0, 0), topology.distance(0, 3)), (10, 20));
}

#[test]
fn nothing_to_read_is_one_node_of_performance_cores() {
    let topology = Topology::read(Path::new("/nowhere"));
    assert_eq!(topology.cpus().len(), 0);
    assert_eq!(topology.nodes(), [0]);
    assert_eq!(choose(&topology, &[3, 1, 2], None), [1, 2, 3]);

    // No list of CPUs, but folders; a sibling list that cannot be; no nodes.
    let fixture =
        Fixture::new(&[("devices/system/cpu/cpufreq/x", ""), ("devices/system/cpu/cpuidle/x", "")]);
    fixture.cpu_file(0, "topology/core_cpus_list", "nonsense");
    fixture.cpu_file(1, "topology/core_cpus_list", "2-3");
    fixture.cpu_file(2, "topology/thread_siblings_list", "2-3");
    fixture.cpu_file(3, "topology/thread_siblings_list", "2-3");
    let topology = fixture.read();
    let cores: Vec<_> = topology.cpus().map(|cpu| (cpu.id, cpu.core, cpu.node, cpu.kind)).collect();
    let plain = |id, core| (id, core, 0, CoreKind::Performance);
    assert_eq!(cores, [plain(0, 0), plain(1, 1), plain(2, 2), plain(3, 2)]);
}

#[test]
fn kinds_of_an_intel_hybrid() {
    // Two cores with two threads each, two small, one smaller.
    let fixture = Fixture::new(&[
        ("devices/system/cpu/online", "0-6"),
        ("devices/cpu_core/cpus", "0-3"),
        ("devices/cpu_atom/cpus", "4-5"),
        ("devices/cpu_lowpower/cpus", "6"),
    ]);
    for cpu in 0..4 {
        fixture.cpu_file(cpu, "topology/core_cpus_list", if cpu < 2 { "0-1" } else { "2-3" });
    }
    let topology = fixture.read();
    use CoreKind::{Efficiency as E, Performance as P};
    assert_eq!(kinds(&topology), [P, P, P, P, E, E, E]);
    let all: Vec<usize> = (0..7).collect();
    assert_eq!(choose(&topology, &all, None), [0, 2, 4, 5, 6]);
    assert_eq!(choose(&topology, &all, Some(7)), [0, 2, 4, 5, 6, 1, 3]);
}

#[test]
fn kinds_by_capacity_and_by_frequency() {
    use CoreKind::{Efficiency as E, Performance as P};
    for (file, values, expected) in [
        ("cpu_capacity", ["446", "446", "871", "1024"], [E, E, P, P]),
        ("cpu_capacity", ["1024", "1024", "1024", "1024"], [P, P, P, P]),
        ("cpufreq/cpuinfo_max_freq", ["5700000", "5500000", "3300000", "3300000"], [P, P, E, E]),
        ("cpufreq/cpuinfo_max_freq", ["5700000", "5500000", "x", "3300000"], [P, P, P, P]),
        ("cpufreq/cpuinfo_max_freq", ["0", "0", "0", "0"], [P, P, P, P]),
    ] {
        let fixture = Fixture::new(&[("devices/system/cpu/online", "0-3")]);
        (0..4).for_each(|cpu| fixture.cpu_file(cpu, file, values[cpu]));
        assert_eq!(kinds(&fixture.read()), expected, "{file} {values:?}");
    }
    // Capacity is asked first: it knows more than a clock.
    let fixture = Fixture::new(&[("devices/system/cpu/online", "0-1")]);
    for (cpu, capacity, frequency) in [(0, "1024", "1000"), (1, "500", "3000")] {
        fixture.cpu_file(cpu, "cpu_capacity", capacity);
        fixture.cpu_file(cpu, "cpufreq/cpuinfo_max_freq", frequency);
    }
    assert_eq!(kinds(&fixture.read()), [P, E]);
}

#[test]
fn this_machine_can_be_read() {
    let topology = Topology::host();
    assert!(topology.nodes().contains(&topology.cpu(0).node));
}

#[test]
fn bad_requests_name_the_value() {
    let topology = server().read();
    let config = |threads, cpus| PoolConfig { threads, cpus };
    let rank = |rank, num_ranks| RankShare { rank, num_ranks };
    for (allowed, config, share, part) in [
        (vec![], config(None, None), RankShare::WHOLE, "no CPU"),
        (vec![0], config(Some(0), None), RankShare::WHOLE, "`0`"),
        (vec![0], config(Some(5000), None), RankShare::WHOLE, "`5000`"),
        (vec![0, 1, 3], config(None, Some(vec![2])), RankShare::WHOLE, "`0-1,3`"),
        (vec![0], config(None, None), rank(2, 2), "`2`"),
        (vec![0], config(None, None), rank(0, 0), "`0`"),
    ] {
        let error = choose_cpus(&topology, &allowed, &config, share, &[]).expect_err(part);
        assert!(matches!(error, Error::Value(_)) && error.to_string().contains(part), "{error}");
    }
}

#[test]
fn cpu_lists() {
    assert_eq!(parse_cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
    assert_eq!(parse_cpu_list("8,0-2,1"), Some(vec![0, 1, 2, 8]));
    assert_eq!(parse_cpu_list("\n"), Some(vec![]));
    for text in
        ["3-1", "-1", "1-", "+1", "a", "1,,2", "1-2-3", "0-99999999", "99999999999999999999", ","]
    {
        assert_eq!(parse_cpu_list(text), None, "{text}");
    }
    assert_eq!(format_cpu_list(&[3, 1, 0, 8, 2, 8]), "0-3,8");
    assert_eq!(format_cpu_list(&[]), "");
}

/// A machine: per core its kind, node and number of hardware threads, with CPUs numbered in any
/// order; and an allowed set.
fn machine() -> impl Strategy<Value = (Topology, Vec<usize>)> {
    prop::collection::vec((any::<bool>(), 0_usize..3, 1_usize..3), 1..12)
        .prop_flat_map(|cores| {
            let num_cpus: usize = cores.iter().map(|core| core.2).sum();
            let ids = Just((0..num_cpus).collect::<Vec<_>>()).prop_shuffle();
            let allowed = prop::collection::vec(prop::bool::weighted(0.8), num_cpus);
            (Just(cores), ids, allowed)
        })
        .prop_map(|(cores, ids, allowed)| {
            let fixture =
                Fixture::new(&[("devices/system/cpu/online", &format!("0-{}", ids.len() - 1))]);
            let mut ids_left = ids.into_iter();
            let mut nodes = vec![Vec::new(); 3];
            for (small, node, num_threads) in cores {
                let siblings: Vec<usize> = ids_left.by_ref().take(num_threads).collect();
                for &cpu in &siblings {
                    fixture.cpu_file(cpu, "topology/core_cpus_list", &format_cpu_list(&siblings));
                    fixture.cpu_file(cpu, "cpu_capacity", if small { "400" } else { "1024" });
                }
                nodes[node].extend(siblings);
            }
            for (node, cpus) in nodes.iter().enumerate() {
                fixture.file(
                    &format!("devices/system/node/node{node}/cpulist"),
                    &format_cpu_list(cpus),
                );
            }
            let mut allowed: Vec<usize> = allowed
                .iter()
                .enumerate()
                .filter(|(_, allowed)| **allowed)
                .map(|(cpu, _)| cpu)
                .collect();
            if allowed.is_empty() {
                allowed.push(0);
            }
            (fixture.read(), allowed)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn any_text_is_a_list_or_none(text in "[0-9,\\- a\n]{0,20}") {
        if let Some(ids) = parse_cpu_list(&text) {
            prop_assert!(ids.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(parse_cpu_list(&format_cpu_list(&ids)), Some(ids));
        }
    }

    #[test]
    fn lists_survive_a_round_trip(ids in prop::collection::btree_set(0_usize..2000, 0..60)) {
        let ids: Vec<usize> = ids.into_iter().collect();
        prop_assert_eq!(parse_cpu_list(&format_cpu_list(&ids)), Some(ids));
    }

    #[test]
    fn the_order_of_cpus((topology, allowed) in machine(), more in 0_usize..5) {
        let cpus = choose(&topology, &allowed, None);
        let cores: HashSet<usize> = allowed.iter().map(|&cpu| topology.cpu(cpu).core).collect();
        prop_assert_eq!(cpus.len(), cores.len(), "one worker per allowed core");
        let cores_used: HashSet<usize> = cpus.iter().map(|&cpu| topology.cpu(cpu).core).collect();
        prop_assert_eq!(&cores_used, &cores);
        prop_assert!(cpus.iter().all(|cpu| allowed.contains(cpu)));
        let key = |cpu: &usize| (topology.cpu(*cpu).kind, topology.cpu(*cpu).node);
        prop_assert!(cpus.is_sorted_by_key(key), "performance first, node by node");

        let every = choose(&topology, &allowed, Some(allowed.len()));
        let set = |cpus: &[usize]| cpus.iter().copied().collect::<HashSet<_>>();
        prop_assert_eq!(set(&every), set(&allowed));
        prop_assert_eq!(&every[..cpus.len()], &cpus[..], "a prefix of one order");
        let beyond = choose(&topology, &allowed, Some(allowed.len() + more));
        let repeated = every.iter().cycle();
        prop_assert!(beyond.iter().zip(repeated).all(|(a, b)| a == b), "then around again");
    }

    #[test]
    fn ranks_share_the_cores((topology, allowed) in machine(), num_ranks in 1_usize..16) {
        let of_rank = |rank| {
            let share = RankShare { rank, num_ranks };
            choose_cpus(&topology, &allowed, &PoolConfig::default(), share, &[]).expect("CPUs")
        };
        let whole = choose(&topology, &allowed, None);
        let shares: Vec<Vec<usize>> = (0..num_ranks).map(of_rank).collect();
        prop_assert!(shares.iter().all(|share| !share.is_empty()));
        let union: HashSet<usize> = shares.iter().flatten().copied().collect();
        if num_ranks <= whole.len() {
            prop_assert_eq!(shares.iter().map(Vec::len).sum::<usize>(), whole.len(), "disjoint");
            prop_assert_eq!(union, whole.iter().copied().collect::<HashSet<_>>(), "and all");
            let sizes = shares.iter().map(Vec::len);
            prop_assert!(sizes.clone().max() <= sizes.min().map(|least| least + 1), "and even");
            // Each kind in proportion, as far as whole cores go.
            for kind in [CoreKind::Performance, CoreKind::Efficiency] {
                let is_kind = |cpu: &&usize| topology.cpu(**cpu).kind == kind;
                let count = |cpus: &[usize]| cpus.iter().filter(is_kind).count();
                let counts: Vec<usize> = shares.iter().map(|share| count(share)).collect();
                let least = counts.iter().min().expect("ranks");
                let most = counts.iter().max().expect("ranks");
                prop_assert!(most - least <= 2, "{:?}", counts);
            }
        } else {
            prop_assert!(shares.iter().all(|share| share.len() == 1));
            prop_assert_eq!(union.len(), whole.len(), "no core is left out");
        }
    }

    #[test]
    fn ranks_share_the_cores_near_their_gpus(
        (topology, allowed) in machine(),
        gpu_nodes in prop::collection::vec(0_usize..4, 1..8),
    ) {
        let whole: HashSet<usize> = choose(&topology, &allowed, None).into_iter().collect();
        let shares = shares(&topology, &allowed, &gpu_nodes);
        let of_node = |share: &[usize], node| {
            share.iter().filter(|&&cpu| topology.cpu(cpu).node == node).count()
        };
        prop_assert!(shares.iter().all(|share| !share.is_empty()));
        let union: HashSet<usize> = shares.iter().flatten().copied().collect();
        prop_assert_eq!(&union, &whole, "no core is left out");
        if gpu_nodes.len() <= whole.len() {
            let total = shares.iter().map(Vec::len).sum::<usize>();
            prop_assert_eq!(total, whole.len(), "each core is one rank's");
            for node in 0..3 {
                let ranks = gpu_nodes.iter().filter(|&&gpu_node| gpu_node == node).count();
                let cores = whole.iter().filter(|&&cpu| topology.cpu(cpu).node == node).count();
                // Ranks of this node that are there share it with none of another node's, unless
                // that found no core on its own.
                let counts: Vec<usize> = shares
                    .iter()
                    .zip(&gpu_nodes)
                    .filter(|(_, gpu_node)| **gpu_node == node)
                    .map(|(share, _)| of_node(share, node))
                    .collect();
                let here = counts.iter().filter(|&&count| count > 0).count();
                prop_assert_eq!(here, ranks.min(cores), "as many as there are cores for");
                if ranks <= cores {
                    let (least, most) = (counts.iter().min(), counts.iter().max());
                    prop_assert!(most <= least.map(|least| least + 1).as_ref(), "{:?}", counts);
                }
            }
            for (share, node) in shares.iter().zip(&gpu_nodes) {
                let kinds = share.iter().map(|&cpu| topology.cpu(cpu).kind);
                let first = kinds.clone().min().expect("a core");
                let is_first = |cpu: &&usize| topology.cpu(**cpu).kind == first;
                let nodes = share.iter().filter(is_first).map(|&cpu| topology.cpu(cpu).node);
                prop_assert!(nodes.is_sorted_by_key(|each| each != *node), "its own node first");
                prop_assert!(kinds.is_sorted(), "performance first");
            }
        }
    }
}
