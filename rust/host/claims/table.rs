//! The file in which processes of a host tell each other what they have claimed.
//!
//! - TABLE-1 Each process has an entry of its own, and the kernel's lock on the bytes of it. The
//!   lock ends with the process, however that ends, and no forked child inherits it. What an entry
//!   without a lock says is not read. So nothing has to be cleared away.
//! - TABLE-2 No call waits for another process, but for its turn, and for that no longer than
//!   [`TURN_SECONDS_MAX`].
//! - TABLE-3 The file belongs to the user alone: no one else can read or lock it.
//!
//! The lock is that of `fcntl`, which belongs to the process. That of `flock` would belong to the
//! open file, and live on in a child of a process that was killed. A lock of `fcntl` ends where the
//! process closes the file, however it has opened it: so it is opened once.
//!
//! Cost: some system calls per process that has an entry; 256 KiB of shared memory at most.

use std::{
    fs::{File, OpenOptions},
    io, mem,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// Of an entry. The first one is no process's: who has its lock has the turn.
const ENTRY_BYTES: usize = 512;
const ENTRIES_MAX: u64 = 512;

/// CPUs that an entry has room for; those beyond are not told.
pub(super) const CPUS_MAX: usize = 1024;
/// Control groups that an entry has room for; those nearer to the root are not told.
pub(super) const GROUPS_MAX: usize = 16;

const MEMORY_AT: usize = 8;
const CPUS_AT: usize = 64;
const GROUPS_AT: usize = CPUS_AT + CPUS_MAX / 8;

/// After that a process that is stopped may have the turn, and others go on without it.
const TURN_SECONDS_MAX: Duration = Duration::from_secs(1);

/// What a process has claimed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) pid: u32,
    /// The process that has started it.
    pub(super) parent: u32,
    /// Of host memory, and not taken yet.
    pub(super) memory_bytes: u64,
    /// Those on which it steps.
    pub(super) cpus: Vec<usize>,
    /// Numbers that stand for the control groups that limit its memory; not 0.
    pub(super) groups: Vec<u64>,
}

impl Entry {
    fn to_bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.parent.to_le_bytes());
        bytes[MEMORY_AT..][..8].copy_from_slice(&self.memory_bytes.to_le_bytes());
        for cpu in self.cpus.iter().filter(|&&cpu| cpu < CPUS_MAX) {
            bytes[CPUS_AT + cpu / 8] |= 1 << (cpu % 8);
        }
        for (index, group) in self.groups.iter().take(GROUPS_MAX).enumerate() {
            bytes[GROUPS_AT + 8 * index..][..8].copy_from_slice(&group.to_le_bytes());
        }
        bytes
    }

    fn of_bytes(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let u32_at = |at: usize| u32::from_le_bytes(array_at(bytes, at));
        let u64_at = |at: usize| u64::from_le_bytes(array_at(bytes, at));
        Self {
            pid: u32_at(0),
            parent: u32_at(4),
            memory_bytes: u64_at(MEMORY_AT),
            cpus: (0..CPUS_MAX)
                .filter(|cpu| bytes[CPUS_AT + cpu / 8] >> (cpu % 8) & 1 != 0)
                .collect(),
            groups: (0..GROUPS_MAX)
                .map(|index| u64_at(GROUPS_AT + 8 * index))
                .filter(|&group| group != 0)
                .collect(),
        }
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut found = [0; N];
    found.copy_from_slice(&bytes[at..at + N]);
    found
}

/// The file, with the entry of this process.
#[derive(Debug)]
pub(super) struct Table {
    file: File,
    index: u64,
}

impl Table {
    /// Opens the table of this user in a folder, or makes it, and takes an entry in it.
    ///
    /// # Errors
    /// Where the file cannot be made, opened, written or locked, is another user's, or has no entry
    /// left.
    pub(super) fn open(folder: &Path, entry: &Entry) -> io::Result<Self> {
        let user = rustix::process::geteuid().as_raw();
        // Another layout takes another name.
        let path = folder.join(format!("stepwell-claims-1-{user}"));
        let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(flags).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() || metadata.uid() != user || metadata.mode() & 0o077 != 0 {
            return Err(io::Error::other("the file there is not this user's alone"));
        }
        // What the last process has left in the entry is not read as this one's.
        let turn = Turn::of(&file);
        let mut found = None;
        for index in 1..ENTRIES_MAX {
            if lock(&file, libc::F_WRLCK, index)? {
                found = Some(index);
                break;
            }
        }
        let index = found
            .ok_or_else(|| io::Error::other(format!("all `{ENTRIES_MAX}` entries are taken")))?;
        file.write_all_at(&entry.to_bytes(), index * ENTRY_BYTES as u64)?;
        drop(turn);
        Ok(Self { file, index })
    }

    /// Says what this process has claimed.
    pub(super) fn write(&self, entry: &Entry) -> io::Result<()> {
        self.file.write_all_at(&entry.to_bytes(), self.index * ENTRY_BYTES as u64)
    }

    /// Says what memory this process has claimed. No other process sees a part of the number: it is
    /// one aligned word.
    pub(super) fn write_memory(&self, nbytes: u64) -> io::Result<()> {
        let at = self.index * ENTRY_BYTES as u64 + MEMORY_AT as u64;
        self.file.write_all_at(&nbytes.to_le_bytes(), at)
    }

    /// What other processes have claimed that live.
    pub(super) fn others(&self) -> io::Result<Vec<Entry>> {
        let num_entries = self.file.metadata()?.len().div_ceil(ENTRY_BYTES as u64);
        let mut found = Vec::new();
        for index in (1..num_entries.min(ENTRIES_MAX)).filter(|&index| index != self.index) {
            if is_locked(&self.file, index)? {
                let mut bytes = [0; ENTRY_BYTES];
                match self.file.read_exact_at(&mut bytes, index * ENTRY_BYTES as u64) {
                    Ok(()) => found.push(Entry::of_bytes(&bytes)),
                    // Its process had no room to write it. The others count.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(found)
    }

    /// Whether the file has no name any more, by which other processes would find it.
    pub(super) fn is_removed(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0)
    }

    /// While it lives no other process has the turn: of two that claim the same, one is first.
    pub(super) fn turn(&self) -> Turn<'_> {
        Turn::of(&self.file)
    }
}

/// See [`Table::turn`].
pub(super) struct Turn<'a>(&'a File);

impl<'a> Turn<'a> {
    fn of(file: &'a File) -> Self {
        let begin = Instant::now();
        // An error is as a lock that does not come: claims are seen before they are weighed, so
        // two without a turn are both refused at worst.
        while !lock(file, libc::F_WRLCK, 0).unwrap_or(false) && begin.elapsed() < TURN_SECONDS_MAX {
            thread::sleep(Duration::from_millis(1));
        }
        Self(file)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Cannot fail for what is locked; what is not stays so.
        let _ = lock(self.0, libc::F_UNLCK, 0);
    }
}

/// A lock of an entry.
fn flock(kind: i32, index: u64) -> libc::flock {
    // SAFETY: a struct of integers.
    let mut flock: libc::flock = unsafe { mem::zeroed() };
    flock.l_type = kind as libc::c_short;
    flock.l_whence = libc::SEEK_SET as libc::c_short;
    flock.l_start = (index * ENTRY_BYTES as u64) as libc::off_t;
    flock.l_len = ENTRY_BYTES as libc::off_t;
    flock
}

/// Locks or unlocks an entry; false: another process has locked it.
fn lock(file: &File, kind: i32, index: u64) -> io::Result<bool> {
    let flock = flock(kind, index);
    // SAFETY: the descriptor is open, and the struct is read only during the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const flock) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EAGAIN) => Ok(false),
        _ => Err(error),
    }
}

/// Whether another process has locked an entry.
fn is_locked(file: &File, index: u64) -> io::Result<bool> {
    let mut flock = flock(libc::F_WRLCK, index);
    // SAFETY: the descriptor is open, and the struct is written only during the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut flock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(flock.l_type) != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_survives_a_round_trip() {
        let entry = Entry {
            pid: 7,
            parent: u32::MAX,
            memory_bytes: u64::MAX - 1,
            cpus: vec![0, 9, CPUS_MAX - 1],
            groups: vec![1, u64::MAX],
        };
        assert_eq!(Entry::of_bytes(&entry.to_bytes()), entry);
        let beyond = Entry { cpus: vec![CPUS_MAX], groups: vec![3; GROUPS_MAX + 1], ..entry };
        let found = Entry::of_bytes(&beyond.to_bytes());
        assert_eq!((found.cpus.len(), found.groups.len()), (0, GROUPS_MAX));
    }

    #[test]
    fn what_is_not_the_users_alone_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let user = rustix::process::geteuid().as_raw();
        let path = folder.path().join(format!("stepwell-claims-1-{user}"));
        std::os::unix::fs::symlink("/etc/passwd", &path).expect("a link");
        assert!(Table::open(folder.path(), &Entry::default()).is_err());
        std::fs::remove_file(&path).expect("removed");
        let mut options = OpenOptions::new();
        let open = options.write(true).create(true).truncate(false).mode(0o666);
        drop(open.open(&path).expect("a file"));
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).expect("a mode");
        assert!(Table::open(folder.path(), &Entry::default()).is_err());
        assert!(Table::open(&folder.path().join("nowhere"), &Entry::default()).is_err());
    }
}
