//! Which GPU each rank of a host has, before any of them is opened.
//!
//! To ask CUDA would open it, which a process that forks later does not survive. So this reads what
//! the NVIDIA driver writes in `/proc`, and the variables that CUDA reads. Rank `i` has the `i`-th
//! GPU of those that CUDA shows, as launchers and their examples have it. Ranks that are shown the
//! same GPUs, or one each, come to the same answer, so what they deal out by it never overlaps.
//! Ranks that are shown several each, of which others see none, are not told apart from those, and
//! may share cores: `claims.rs` has that said. Where it is not the GPU that a rank steps beside,
//! the rank's cores are farther from its GPU, and nothing else is different.

use std::{fs, path::Path};

use super::topology::{Topology, normalise_pci_address};

/// What the driver says of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gpu {
    /// Its PCI address.
    address: String,
    model: String,
    /// `GPU-` and a number.
    uuid: String,
}

/// The PCI address of each rank's GPU; None where that cannot be known: other GPUs than NVIDIA's,
/// fewer GPUs than ranks, parts of GPUs (MIG), or an order that only CUDA knows.
///
/// `root`: what has `/proc`. `variable`: reads the environment.
pub fn of_ranks(
    root: &Path,
    variable: impl Fn(&str) -> Option<String>,
    num_ranks: usize,
) -> Option<Vec<String>> {
    let all = of_driver(root);
    // CUDA has the fastest first, if nothing else was asked for.
    let is_in_order = all.windows(2).all(|pair| pair[0].model == pair[1].model)
        || variable("CUDA_DEVICE_ORDER").is_some_and(|order| order.trim() == "PCI_BUS_ID");
    if !is_in_order {
        return None;
    }
    let visible = match variable("CUDA_VISIBLE_DEVICES") {
        None => all.clone(),
        Some(list) => visible(&all, &list)?,
    };
    let of_ranks = if visible.len() >= num_ranks {
        visible
    } else if visible.len() == 1 && all.len() == num_ranks {
        // The launcher shows each rank its own.
        all
    } else {
        return None;
    };
    Some(of_ranks.into_iter().take(num_ranks).map(|gpu| gpu.address).collect())
}

/// The PCI addresses of all GPUs that the NVIDIA driver shows, ascending.
pub fn addresses(root: &Path) -> Vec<String> {
    of_driver(root).into_iter().map(|gpu| gpu.address).collect()
}

/// The NUMA node of each rank's GPU; empty where one of them is not known.
pub fn nodes_of_ranks(
    topology: &Topology,
    root: &Path,
    variable: impl Fn(&str) -> Option<String>,
    num_ranks: usize,
) -> Vec<usize> {
    let addresses = of_ranks(root, variable, num_ranks).unwrap_or_default();
    let nodes: Option<Vec<usize>> =
        addresses.iter().map(|address| topology.node_of_gpu(address)).collect();
    nodes.unwrap_or_default()
}

/// By PCI address.
fn of_driver(root: &Path) -> Vec<Gpu> {
    let Ok(entries) = fs::read_dir(root.join("proc/driver/nvidia/gpus")) else {
        return Vec::new();
    };
    let mut gpus: Vec<Gpu> = entries
        .flatten()
        .filter_map(|entry| {
            let text = fs::read_to_string(entry.path().join("information")).unwrap_or_default();
            let value = |name: &str| {
                let line = text.lines().find_map(|line| line.strip_prefix(name));
                line.unwrap_or_default().trim().to_owned()
            };
            Some(Gpu {
                address: normalise_pci_address(&entry.file_name().into_string().ok()?),
                model: value("Model:"),
                uuid: value("GPU UUID:"),
            })
        })
        .collect();
    gpus.sort_by(|a, b| a.address.cmp(&b.address));
    gpus
}

/// What `CUDA_VISIBLE_DEVICES` shows, as CUDA reads it: up to the first entry that is no GPU. None
/// for entries that are not looked into.
fn visible(all: &[Gpu], list: &str) -> Option<Vec<Gpu>> {
    let mut found = Vec::new();
    for entry in list.split(',').map(str::trim) {
        if entry.starts_with("MIG") {
            return None;
        }
        let mut named = all.iter().enumerate().filter(|(index, gpu)| {
            entry.parse() == Ok(*index)
                || (entry.starts_with("GPU-") && gpu.uuid.starts_with(entry))
        });
        match (named.next(), named.next()) {
            (Some((_, gpu)), None) => found.push(gpu.clone()),
            _ => break,
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/proc` with GPUs: address, model.
    fn driver(gpus: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (index, (address, model)) in gpus.iter().enumerate() {
            let folder = root.path().join("proc/driver/nvidia/gpus").join(address);
            fs::create_dir_all(&folder).expect("a folder");
            let text = format!("Model: \t\t {model}\nIRQ:   \t\t 9\nGPU UUID: \t GPU-{index}a-b\n");
            fs::write(folder.join("information"), text).expect("a file");
        }
        root
    }

    fn of(root: &Path, variables: &[(&str, &str)], num_ranks: usize) -> Option<Vec<String>> {
        let value = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, text)| (*text).to_owned())
        };
        of_ranks(root, value, num_ranks)
    }

    const FOUR: [(&str, &str); 4] = [
        ("0000:c1:00.0", "H"),
        ("0000:07:00.0", "H"),
        ("0000:47:00.0", "H"),
        ("0000:81:00.0", "H"),
    ];

    #[test]
    fn ranks_have_the_gpus_in_cudas_order() {
        let root = driver(&FOUR);
        let (a, b, c, d) = ("0000:07:00.0", "0000:47:00.0", "0000:81:00.0", "0000:c1:00.0");
        let owned = |addresses: &[&str]| {
            Some(addresses.iter().map(|&address| address.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(root.path(), &[], 4), owned(&[a, b, c, d]));
        assert_eq!(of(root.path(), &[], 1), owned(&[a]));
        let visible = |list| [("CUDA_VISIBLE_DEVICES", list)];
        assert_eq!(of(root.path(), &visible("3, 1"), 2), owned(&[d, b]));
        // The folder of the fourth was written first.
        assert_eq!(of(root.path(), &visible("GPU-0a,GPU-2a-b"), 2), owned(&[d, b]));
        assert_eq!(of(root.path(), &visible("1,7,2"), 1), owned(&[b]), "up to what is none");
        assert_eq!(of(root.path(), &visible("2"), 4), owned(&[a, b, c, d]), "each its own");
        for list in ["1,7,2", "0,MIG-GPU-0a/1/0", "GPU-,0", ""] {
            assert_eq!(of(root.path(), &visible(list), 2), None, "{list}");
        }
        assert_eq!(of(root.path(), &[], 5), None);
    }

    #[test]
    fn an_order_that_only_cuda_knows_is_not_guessed() {
        let root = driver(&[("0000:07:00.0", "slow"), ("0000:47:00.0", "fast")]);
        assert_eq!(of(root.path(), &[], 2), None);
        assert!(of(root.path(), &[("CUDA_DEVICE_ORDER", "PCI_BUS_ID")], 2).is_some());
        assert_eq!(of(Path::new("/nowhere"), &[], 1), None);
    }
}
