//! Host memory that can still be had: what the kernel estimates, and what the control groups of
//! this process leave.
//!
//! Pages of files, reclaimable slabs and the cache of ZFS count as free: the kernel gives them up
//! when memory is asked for. Swap does not: a step that swaps is slower than any refusal.
//!
//! Cost: a few small files are read, some 100 us.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// A version of the control groups: where its files are, and what they are called.
struct Hierarchy {
    /// Below `/sys/fs/cgroup`.
    folder: &'static str,
    /// The controller in `/proc/self/cgroup`.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Prefix of the names in `memory.stat` that count the groups below, too.
    prefix: &'static str,
}

const HIERARCHIES: [Hierarchy; 2] = [
    Hierarchy {
        folder: "",
        controller: "",
        limit: "memory.max",
        used: "memory.current",
        prefix: "",
    },
    Hierarchy {
        folder: "memory",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        prefix: "total_",
    },
];

/// What one thing leaves of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limit {
    /// Bytes.
    pub(super) left: u64,
    /// The control group; `None`: the host.
    pub(super) group: Option<u64>,
}

/// Bytes that this process can still take; `None` where the system does not say.
#[must_use]
pub fn free_bytes() -> Option<u64> {
    limits().into_iter().map(|limit| limit.left).min()
}

/// What the host and each control group of this process leave.
pub(super) fn limits() -> Vec<Limit> {
    limits_of(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

/// The control groups of this process, the innermost first, by the numbers that limits have.
pub(super) fn groups() -> Vec<u64> {
    group_folders(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
        .iter()
        .filter_map(|(_, folder)| number_of(folder))
        .collect()
}

fn limits_of(proc: &Path, cgroups: &Path) -> Vec<Limit> {
    let meminfo = fs::read_to_string(proc.join("meminfo")).ok();
    let host = meminfo.and_then(|text| {
        Some(number_in(&text, "MemAvailable:", 1)? * 1024 + reclaimable_of_zfs(proc))
    });
    let groups = group_folders(proc, cgroups).into_iter().filter_map(|(hierarchy, folder)| {
        Some(Limit { left: left_in(hierarchy, &folder)?, group: number_of(&folder) })
    });
    host.into_iter().map(|left| Limit { left, group: None }).chain(groups).collect()
}

/// The folder of each control group of this process, and of those above.
fn group_folders(proc: &Path, cgroups: &Path) -> Vec<(&'static Hierarchy, PathBuf)> {
    let membership = fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let folders = HIERARCHIES.iter().flat_map(|hierarchy| {
        let folder = cgroups.join(hierarchy.folder);
        groups_of(hierarchy, &membership).map(move |group| (hierarchy, folder.join(group)))
    });
    folders.collect()
}

/// A group is what its folder is: containers see it at other paths. `None` for no folder.
fn number_of(folder: &Path) -> Option<u64> {
    let metadata = fs::metadata(folder).ok()?;
    Some((metadata.ino() ^ metadata.dev().rotate_left(32)).max(1))
}

/// What ZFS holds in its cache beyond the least that it keeps: no part of the kernel's estimate.
fn reclaimable_of_zfs(proc: &Path) -> u64 {
    let text = fs::read_to_string(proc.join("spl/kstat/zfs/arcstats")).unwrap_or_default();
    // Name, type, value.
    let value = |name: &str| number_in(&text, name, 2).unwrap_or(0);
    value("size").saturating_sub(value("c_min"))
}

/// The group of this process in a hierarchy and those above it, relative to its root. In a
/// container without a namespace for them, only the root is there.
fn groups_of(hierarchy: &Hierarchy, membership: &str) -> impl Iterator<Item = PathBuf> {
    let path = membership.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let mut controllers = fields.next()?.split(',');
        controllers.any(|name| name == hierarchy.controller).then(|| fields.next())?
    });
    let path = PathBuf::from(path.unwrap_or_default().trim_start_matches('/'));
    path.ancestors().map(Path::to_owned).collect::<Vec<_>>().into_iter()
}

/// What the limit of a group leaves; `None` where it has none.
fn left_in(hierarchy: &Hierarchy, group: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    // `max`, or a number beyond every machine, is no limit.
    let limit: u64 = read(hierarchy.limit)?.trim().parse().ok()?;
    let used: u64 = read(hierarchy.used)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let counted =
        |name: &str| number_in(&stat, &format!("{}{name}", hierarchy.prefix), 1).unwrap_or(0);
    let reclaimable =
        counted("inactive_file") + counted("active_file") + counted("slab_reclaimable");
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

/// The number that is word `index` of the line that begins with the word `name`, which is word 0.
fn number_in(text: &str, name: &str, index: usize) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(index)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A machine with 64 GiB free and these files of control groups.
    fn free_with(membership: &str, files: &[(&str, String)]) -> Option<u64> {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write(
            root.path().join("proc/meminfo"),
            "MemTotal: 99999999 kB\nMemAvailable:   67108864 kB\n",
        );
        write(root.path().join("proc/self/cgroup"), membership);
        for (path, text) in files {
            write(root.path().join("cgroup").join(path), text);
        }
        let limits = limits_of(&root.path().join("proc"), &root.path().join("cgroup"));
        limits.into_iter().map(|limit| limit.left).min()
    }

    fn bytes(gib: u64) -> String {
        format!("{}\n", gib * GIB)
    }

    #[test]
    fn without_a_limit_it_is_what_the_kernel_estimates() {
        assert_eq!(free_with("0::/\n", &[]), Some(64 * GIB));
        let unlimited = [("job/memory.max", "max\n".to_owned()), ("job/memory.current", bytes(1))];
        assert_eq!(free_with("0::/job\n", &unlimited), Some(64 * GIB));
    }

    #[test]
    fn a_limit_leaves_what_is_not_used_and_what_files_hold() {
        let stat = format!(
            "anon 5\ninactive_file {}\nactive_file {}\nfile 7\nslab_reclaimable {GIB}\n",
            3 * GIB,
            2 * GIB
        );
        let files = [
            ("job/memory.max", bytes(16)),
            ("job/memory.current", bytes(9)),
            ("job/memory.stat", stat),
        ];
        assert_eq!(free_with("0::/job\n", &files), Some(13 * GIB));
    }

    #[test]
    fn what_zfs_can_give_up_is_free() {
        let stats =
            format!("9 1 0x01 147\nname type data\nhits 4 12\nc_min 4 {GIB}\nsize 4 {}\n", 5 * GIB);
        assert_eq!(
            free_with("0::/\n", &[("../proc/spl/kstat/zfs/arcstats", stats)]),
            Some(68 * GIB)
        );
    }

    #[test]
    fn every_group_above_limits_too() {
        let files = [
            ("memory.max", bytes(60)),
            ("memory.current", bytes(0)),
            ("user/memory.max", bytes(8)),
            ("user/memory.current", bytes(6)),
            ("user/job/memory.max", bytes(32)),
            ("user/job/memory.current", bytes(1)),
        ];
        assert_eq!(free_with("0::/user/job\n", &files), Some(2 * GIB));
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        let files = [
            ("memory/memory.limit_in_bytes", bytes(8)),
            ("memory/memory.usage_in_bytes", bytes(9)),
        ];
        assert_eq!(
            free_with("9:name=systemd:/\n4:cpu,memory:/docker/1234\n0::/\n", &files),
            Some(0)
        );
    }

    #[test]
    fn the_older_version_counts_the_groups_below() {
        let stat = format!("inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n");
        let files = [
            ("memory/job/memory.limit_in_bytes", bytes(8)),
            ("memory/job/memory.usage_in_bytes", bytes(4)),
            ("memory/job/memory.stat", stat),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n".to_owned()),
            ("memory/memory.usage_in_bytes", bytes(4)),
        ];
        assert_eq!(free_with("4:memory:/job\n", &files), Some(5 * GIB));
    }

    #[test]
    fn a_system_that_does_not_say_limits_nothing() {
        assert_eq!(limits_of(Path::new("/nonexistent"), Path::new("/nonexistent")), []);
    }
}
