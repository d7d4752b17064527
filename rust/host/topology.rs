//! The machine as `/sys` describes it: CPUs, their cores and kinds, NUMA nodes, and the node a GPU
//! or a drive hangs on.
//!
//! [`Topology::read`] is a pure parser over a root folder, so that any machine can be a fixture. It
//! never fails: what is missing or cannot be read degrades to the plain case (every CPU its own
//! core, all performance, all on node 0; a device's node unknown). Cost: a few small files per CPU,
//! read once when a pool is made.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Above any CPU number that Linux gives; keeps a corrupt list from becoming an allocation.
const CPU_LIMIT: usize = 1 << 16;

/// A core below this share of the largest capacity or frequency counts as an efficiency core. The
/// favoured cores of one kind differ by under a tenth; efficiency cores known so far reach at most
/// four fifths.
const EFFICIENCY_BELOW_PERCENT: u64 = 80;

/// Distances of NUMA nodes, where the firmware does not say.
const DISTANCE_SELF: u64 = 10;
const DISTANCE_OTHER: u64 = 20;

/// PCI base classes of what computes: display controllers and processing accelerators.
const PCI_CLASSES_GPU: [&str; 2] = ["0x03", "0x12"];

/// What a core is built for. Ordered: performance first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CoreKind {
    /// A full core; every core of a machine with one kind only.
    Performance,
    /// A small core of a hybrid machine.
    Efficiency,
}

/// One hardware thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cpu {
    /// Its number, as in `/sys/devices/system/cpu/cpuN`.
    pub id: usize,
    /// The physical core: the lowest CPU number among its hardware threads.
    pub core: usize,
    /// What the core is built for.
    pub kind: CoreKind,
    /// The NUMA node.
    pub node: usize,
}

/// A GPU or a drive, and where it hangs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The name in `/sys`: a PCI address for a GPU (`0000:3b:00.0`), a controller for a drive
    /// (`nvme0`).
    pub name: String,
    /// The NUMA node; `None` where the firmware does not say.
    pub node: Option<usize>,
}

/// CPUs, nodes and devices of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    cpus: BTreeMap<usize, Cpu>,
    nodes: Vec<usize>,
    distances: BTreeMap<(usize, usize), u64>,
    isolated: Vec<usize>,
    gpus: Vec<Device>,
    drives: Vec<Device>,
}

impl Topology {
    /// This machine.
    pub fn host() -> Self {
        Self::read(Path::new("/"))
    }

    /// The machine whose `/sys` lies at `root/sys`.
    pub fn read(root: &Path) -> Self {
        let sys = root.join("sys");
        let ids = online_cpus(&sys);
        let nodes = nodes(&sys);
        let kinds = Kinds::read(&sys, &ids);
        let cpus = ids
            .iter()
            .map(|&id| {
                let node =
                    nodes.iter().find(|(_, cpus)| cpus.contains(&id)).map_or(0, |(node, _)| *node);
                (id, Cpu { id, core: core_of(&sys, id), kind: kinds.of(id), node })
            })
            .collect();
        let nodes = if nodes.is_empty() { vec![0] } else { nodes.into_keys().collect() };
        let distances = distances(&sys, &nodes);
        let isolated = read_cpu_list(&sys.join("devices/system/cpu/isolated")).unwrap_or_default();
        Self { cpus, nodes, distances, isolated, gpus: gpus(&sys), drives: drives(&sys) }
    }

    /// The CPUs that are online, by number. Empty where `/sys` is not mounted.
    pub fn cpus(&self) -> impl ExactSizeIterator<Item = &Cpu> {
        self.cpus.values()
    }

    /// A CPU; one that `/sys` does not know is a performance core of its own on node 0.
    pub fn cpu(&self, id: usize) -> Cpu {
        self.cpus.get(&id).copied().unwrap_or(Cpu {
            id,
            core: id,
            kind: CoreKind::Performance,
            node: 0,
        })
    }

    /// The NUMA nodes, by number; at least one. A node without CPUs (memory only) is among them.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// How far the memory of one node is from the cores of another, as the firmware says: 10 is the
    /// node itself, and larger is farther. All others are equally far where it does not say.
    pub fn distance(&self, from: usize, to: usize) -> u64 {
        let usual = if from == to { DISTANCE_SELF } else { DISTANCE_OTHER };
        self.distances.get(&(from, to)).copied().unwrap_or(usual)
    }

    /// CPUs taken out of the scheduler by the boot option `isolcpus`.
    pub fn isolated_cpus(&self) -> &[usize] {
        &self.isolated
    }

    /// GPUs and other accelerators on the PCI bus, by address.
    pub fn gpus(&self) -> &[Device] {
        &self.gpus
    }

    /// NVMe controllers, by name.
    pub fn drives(&self) -> &[Device] {
        &self.drives
    }

    /// The node of the GPU at a PCI address, written as `/sys` or as CUDA does
    /// (`00000000:3B:00.0`).
    pub fn node_of_gpu(&self, pci_address: &str) -> Option<usize> {
        let address = normalise_pci_address(pci_address);
        self.gpus.iter().find(|gpu| gpu.name == address)?.node
    }

    /// The node of a drive, named by controller, namespace or partition (`nvme0`, `nvme0n1`,
    /// `nvme0n1p2`).
    pub fn node_of_drive(&self, name: &str) -> Option<usize> {
        let digits = name.strip_prefix("nvme")?;
        let digits = &digits[..digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len())];
        self.drives.iter().find(|drive| drive.name.strip_prefix("nvme") == Some(digits))?.node
    }
}

/// The numbers in a kernel CPU list such as `0-3,8`, ascending and without repeats; `None` if it is
/// not one. An empty list is empty.
pub fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let text = text.trim();
    let mut ids = Vec::new();
    if text.is_empty() {
        return Some(ids);
    }
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (parse_number(first)?, parse_number(last)?);
        if first > last || last >= CPU_LIMIT {
            return None;
        }
        ids.extend(first..=last);
    }
    ids.sort_unstable();
    ids.dedup();
    Some(ids)
}

/// CPU numbers as a kernel list: the inverse of [`parse_cpu_list`], for messages.
pub fn format_cpu_list(ids: &[usize]) -> String {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids.chunk_by(|a, b| a + 1 == *b)
        .map(|run| match run {
            [only] => only.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        })
        .collect::<Vec<_>>()
        .join(",")
}

/// Digits only: `str::parse` would take a sign.
fn parse_number(text: &str) -> Option<usize> {
    let text = text.trim();
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn read_text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn read_cpu_list(path: &Path) -> Option<Vec<usize>> {
    parse_cpu_list(&read_text(path)?)
}

fn read_number(path: &Path) -> Option<u64> {
    read_text(path)?.parse().ok()
}

/// A node file; `-1` there means unknown.
fn read_node(path: &Path) -> Option<usize> {
    read_text(path)?.parse().ok()
}

/// The entries of a folder named `prefix` followed by a number, by that number.
fn numbered_entries(folder: &Path, prefix: &str) -> BTreeMap<usize, PathBuf> {
    entries(folder)
        .into_iter()
        .filter_map(|(name, path)| {
            let digits = name.strip_prefix(prefix).filter(|digits| !digits.is_empty())?;
            Some((parse_number(digits)?, path))
        })
        .collect()
}

fn entries(folder: &Path) -> BTreeMap<String, PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return BTreeMap::new() };
    entries
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect()
}

fn cpu_folder(sys: &Path, id: usize) -> PathBuf {
    sys.join(format!("devices/system/cpu/cpu{id}"))
}

fn online_cpus(sys: &Path) -> Vec<usize> {
    let folder = sys.join("devices/system/cpu");
    read_cpu_list(&folder.join("online")).unwrap_or_else(|| {
        numbered_entries(&folder, "cpu").into_keys().filter(|&id| id < CPU_LIMIT).collect()
    })
}

fn core_of(sys: &Path, id: usize) -> usize {
    let topology = cpu_folder(sys, id).join("topology");
    // The second name is that of kernels before 5.1.
    ["core_cpus_list", "thread_siblings_list"]
        .iter()
        .find_map(|name| {
            read_cpu_list(&topology.join(name)).filter(|siblings| siblings.contains(&id))
        })
        .map_or(id, |siblings| siblings[0])
}

fn nodes(sys: &Path) -> BTreeMap<usize, Vec<usize>> {
    numbered_entries(&sys.join("devices/system/node"), "node")
        .into_iter()
        .filter_map(|(node, path)| Some((node, read_cpu_list(&path.join("cpulist"))?)))
        .collect()
}

/// Each node has a list of distances, in the order of the nodes.
fn distances(sys: &Path, nodes: &[usize]) -> BTreeMap<(usize, usize), u64> {
    let mut found = BTreeMap::new();
    for &from in nodes {
        let path = sys.join(format!("devices/system/node/node{from}/distance"));
        let text = read_text(&path).unwrap_or_default();
        let row: Option<Vec<u64>> =
            text.split_whitespace().map(|distance| distance.parse().ok()).collect();
        let row = row.filter(|row| row.len() == nodes.len()).unwrap_or_default();
        found.extend(nodes.iter().zip(row).map(|(&to, distance)| ((from, to), distance)));
    }
    found
}

/// Which CPUs are efficiency cores, by the first source that tells CPUs apart.
struct Kinds {
    efficiency: Vec<usize>,
}

impl Kinds {
    fn read(sys: &Path, ids: &[usize]) -> Self {
        let from_units = || {
            // Intel hybrids have one performance-counter unit per kind of core.
            let performance = read_cpu_list(&sys.join("devices/cpu_core/cpus"))?;
            (!performance.is_empty()).then(|| {
                let small = ["cpu_atom", "cpu_lowpower"];
                small
                    .iter()
                    .filter_map(|unit| read_cpu_list(&sys.join(format!("devices/{unit}/cpus"))))
                    .flatten()
                    .collect()
            })
        };
        let below = |file: &str| {
            let values: Option<Vec<(usize, u64)>> = ids
                .iter()
                .map(|&id| Some((id, read_number(&cpu_folder(sys, id).join(file))?)))
                .collect();
            let values = values?;
            let largest =
                values.iter().map(|&(_, value)| value).max().filter(|&value| value > 0)?;
            let threshold = u128::from(largest) * u128::from(EFFICIENCY_BELOW_PERCENT);
            Some(
                values
                    .into_iter()
                    .filter(|&(_, value)| u128::from(value) * 100 < threshold)
                    .map(|(id, _)| id)
                    .collect(),
            )
        };
        let efficiency = from_units()
            .or_else(|| below("cpu_capacity"))
            .or_else(|| below("cpufreq/cpuinfo_max_freq"));
        Self { efficiency: efficiency.unwrap_or_default() }
    }

    fn of(&self, id: usize) -> CoreKind {
        if self.efficiency.contains(&id) { CoreKind::Efficiency } else { CoreKind::Performance }
    }
}

fn gpus(sys: &Path) -> Vec<Device> {
    entries(&sys.join("bus/pci/devices"))
        .into_iter()
        .filter(|(_, path)| {
            read_text(&path.join("class"))
                .is_some_and(|class| PCI_CLASSES_GPU.iter().any(|base| class.starts_with(base)))
        })
        .map(|(name, path)| Device {
            name: normalise_pci_address(&name),
            node: read_node(&path.join("numa_node")),
        })
        .collect()
}

fn drives(sys: &Path) -> Vec<Device> {
    numbered_entries(&sys.join("class/nvme"), "nvme")
        .into_iter()
        .map(|(index, path)| Device {
            name: format!("nvme{index}"),
            node: ["numa_node", "device/numa_node"]
                .iter()
                .find_map(|file| read_node(&path.join(file))),
        })
        .collect()
}

/// Lower case with a domain of four digits, as `/sys` writes it.
pub(super) fn normalise_pci_address(address: &str) -> String {
    let address = address.trim().to_ascii_lowercase();
    match address.split_once(':') {
        Some((domain, rest))
            if domain.len() == 8 && domain.starts_with("0000") && rest.contains(':') =>
        {
            format!("{}:{rest}", &domain[4..])
        }
        Some((_, rest)) if !rest.contains(':') => format!("0000:{address}"),
        _ => address,
    }
}
