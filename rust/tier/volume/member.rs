//! The file of a member: made, found again, locked, removed.
//!
//! - MBR-1 The space of a file is taken when it is made. A full drive is an error there. (What
//!   shares space among snapshots can still be full later. That is an error of the write then.)
//! - MBR-2 A file is locked by the description through which all of its I/O goes (`flock`). The
//!   kernel holds that description until the last I/O through it has ended, also that of a process
//!   that was killed. So who has the lock is alone, and nothing that was submitted before lands
//!   later: the lock is the fence.
//! - MBR-3 I/O bypasses the page cache (`O_DIRECT`) where the file system can. What it asks of
//!   offsets is found out, and a volume's block is a multiple of it.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, IFlags, OFlags},
    io::Errno,
};

use super::format::{BLOCK_BYTES_MIN, HEADER_SPACE_BYTES};
use crate::{
    Error, Result,
    tier::io::{
        direct::{self, Alignment},
        disk::{Between, Disk},
        engine::Target,
    },
};

/// Between two tries of a lock whose holder has ended.
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// A holder that still runs after this is not about to end: between a signal and its effect a
/// process looks like any other.
const HOLDER_GRACE: Duration = Duration::from_millis(100);

/// Set in the flags of a process that is ending (`PF_EXITING`).
const FLAG_EXITING: u64 = 4;

/// SIGKILL in a set of signals.
const SIGKILL_BIT: u64 = 1 << 8;

/// The file of a member.
pub(super) struct Member {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    /// The file, or what stands between.
    pub(super) disk: Arc<dyn Disk>,
    /// What offsets have to be multiples of; `None` where the page cache is between.
    direct_bytes: Option<usize>,
}

/// The name of a member's file.
pub(super) fn path(folder: &Path, name: &str, member: usize) -> PathBuf {
    folder.join(format!("{name}.{member}.stepwell"))
}

/// The name of the volume and the number of the member whose file this is, by its name.
pub(super) fn parse(path: &Path) -> Option<(String, usize)> {
    let file = path.file_name()?.to_str()?.strip_suffix(".stepwell")?;
    let (name, member) = file.rsplit_once('.')?;
    Some((name.to_owned(), member.parse().ok()?))
}

fn named(volume: &str, member: usize, path: &Path) -> String {
    format!("volume `{volume}`: member `{member}` ({})", path.display())
}

impl Member {
    /// Makes the file, locked and empty.
    pub(super) fn create(
        volume: &str,
        number: usize,
        folder: &Path,
        between: Option<&Between>,
    ) -> Result<Self> {
        let path = path(folder, volume, number);
        let refused = |error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    "another job's, or kept: open it, remove it, or choose another name"
                }
                io::ErrorKind::NotFound => "the folder has to be there",
                io::ErrorKind::ReadOnlyFilesystem => "it is mounted read-only",
                _ => "it has to be a folder that this process may write to",
            };
            Error::os(format!("cannot make {}; hint: {hint}", named(volume, number, &path)), error)
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(refused)?;
        set_in_place(&file);
        let member = Self::new(number, path.clone(), file, between);
        // Nothing else knows the file, unless it opened it this moment to look whether it is one.
        match member.try_lock() {
            Ok(()) => Ok(member),
            Err(error) => {
                member.remove();
                Err(refused(error))
            }
        }
    }

    fn new(number: usize, path: PathBuf, file: File, between: Option<&Between>) -> Self {
        let direct_bytes = set_direct(&file);
        let file = Arc::new(file);
        let disk: Arc<dyn Disk> = match between {
            Some(between) => between(number, Arc::clone(&file)),
            None => Arc::clone(&file) as _,
        };
        Self { path, file, disk, direct_bytes }
    }

    /// Opens the file of a volume that was made before, and locks it. Where the process that holds
    /// the lock has ended, waits up to `timeout` for its last writes.
    pub(super) fn open(
        volume: &str,
        number: usize,
        folder: &Path,
        timeout: Duration,
        between: Option<&Between>,
    ) -> Result<Self> {
        let path = path(folder, volume, number);
        let named = named(volume, number, &path);
        let refused = |error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::NotFound => "it is missing: name the folders that it was made with",
                _ => "it has to be a file that this process may read and write",
            };
            Error::os(format!("cannot open {named}; hint: {hint}"), error)
        };
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(refused)?;
        let member = Self::new(number, path, file, between);
        let begin = Instant::now();
        let mut has_warned = false;
        while let Err(error) = member.try_lock() {
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(refused(error));
            }
            let holder = holder(&member.file).filter(|_| begin.elapsed() >= HOLDER_GRACE);
            if let Some(holder) = &holder {
                return Err(Error::os(
                    format!("{named} is used by {holder}; hint: one job at a time uses a volume"),
                    Errno::BUSY,
                ));
            }
            if begin.elapsed() >= timeout {
                return Err(Error::os(
                    format!(
                        "{named} is locked, and not by a process that can be seen from here, after \
                         `{:.1}` s; hint: writes of a process that was killed are still on their \
                         way to the drive, a forked child of it still runs, or a process of \
                         another container uses it",
                        timeout.as_secs_f64()
                    ),
                    error,
                ));
            }
            if !has_warned && begin.elapsed() > Duration::from_secs(1) {
                has_warned = true;
                log::warn!(
                    target: "stepwell",
                    "{named}: waiting for the last writes of a process that has ended, up to \
                     {:.0} s",
                    timeout.as_secs_f64()
                );
            }
            std::thread::sleep(LOCK_RETRY);
        }
        if member.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0) {
            return Err(Error::os(
                format!("{named} was removed by the process that used it"),
                Errno::NOENT,
            ));
        }
        Ok(member)
    }

    fn try_lock(&self) -> io::Result<()> {
        Ok(rustix::fs::flock(&*self.file, FlockOperation::NonBlockingLockExclusive)?)
    }

    /// The file as an engine uses it.
    pub(super) fn target(&self) -> Arc<Target> {
        let (file, disk) = (Arc::clone(&self.file), Arc::clone(&self.disk));
        Arc::new(Target { file, disk, unit_bytes: BLOCK_BYTES_MIN })
    }

    /// Offsets and sizes have to be multiples of this.
    pub(super) fn block_bytes(&self) -> usize {
        self.direct_bytes.map_or(BLOCK_BYTES_MIN, |bytes| bytes.max(BLOCK_BYTES_MIN))
    }

    /// Whether I/O bypasses the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct_bytes.is_some()
    }

    /// Takes the space.
    pub(super) fn allocate(&self, volume: &str, number: usize, nbytes: u64) -> Result<()> {
        let no_room = |error: io::Error| {
            let free = rustix::fs::fstatvfs(&*self.file)
                .map_or("unknown".to_owned(), |stat| (stat.f_bavail * stat.f_frsize).to_string());
            Error::os(
                format!(
                    "cannot take `{nbytes}` bytes for {}, `{free}` are free; hint: `durability` \
                     none takes half the space, and moments of `q8` a third",
                    named(volume, number, &self.path)
                ),
                error,
            )
        };
        self.disk.allocate(nbytes).map_err(no_room)
    }

    /// Makes the file's name durable.
    pub(super) fn sync_folder(&self) -> io::Result<()> {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        File::open(folder)?.sync_all()
    }

    /// Whether the file still has a name: what a commit writes is found by it.
    pub(super) fn check_name(&self, volume: &str, number: usize) -> Result<()> {
        let named = || named(volume, number, &self.path);
        match self.file.metadata() {
            Ok(metadata) if metadata.nlink() > 0 => Ok(()),
            Ok(_) => Err(Error::os(
                format!(
                    "{} was removed while it is used, so no step can be resumed from the volume; \
                     hint: go on from a checkpoint, with a new volume",
                    named()
                ),
                Errno::NOENT,
            )),
            Err(error) => Err(Error::os(format!("cannot look at {}", named()), error)),
        }
    }

    /// Removes the file's name, where it is still this file's.
    pub(super) fn remove(&self) {
        let inode = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let is_ours = self
            .file
            .metadata()
            .and_then(|ours| Ok(inode(ours) == inode(fs::symlink_metadata(&self.path)?)));
        // Gone already is as good.
        if is_ours.unwrap_or(false)
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!(
                target: "stepwell",
                "cannot remove {} ({error}), which takes `{}` bytes",
                self.path.display(),
                self.file.metadata().map_or(0, |metadata| metadata.len())
            );
        }
    }

    /// Gives the lock back, also where a forked child holds the file open.
    pub(super) fn unlock(&self) {
        let _ = rustix::fs::flock(&*self.file, FlockOperation::Unlock);
    }
}

/// Who has the lock of a file: a process that runs. One that has ended or was killed, and one that
/// cannot be seen from here, is `None`.
pub(super) fn holder(file: &File) -> Option<String> {
    let metadata = file.metadata().ok()?;
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let pid = holder_in(&locks, metadata.dev(), metadata.ino())?;
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let command = running(&read("stat")?, &read("status")?)?;
    Some(format!("process `{pid}` ({command})"))
}

/// The process that has a `flock` on this inode, of the text of `/proc/locks`. It has 0 for one
/// that has ended or is of another container. Where a file system has devices of its own that only
/// `stat` knows (btrfs), nobody is found.
fn holder_in(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let expected =
        format!("{:02x}:{:02x}:{inode}", rustix::fs::major(device), rustix::fs::minor(device));
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid: u32 = words.nth(2)?.parse().ok()?;
        (words.next()? == expected && pid != 0).then_some(pid)
    })
}

/// The command of a process, of the texts of its `stat` and `status`, unless it has ended, is
/// ending or was killed.
fn running(stat: &str, status: &str) -> Option<String> {
    let (command, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let mut words = rest.split_whitespace();
    let has_ended = matches!(words.next()?, "Z" | "X");
    let flags: u64 = words.nth(5)?.parse().ok()?;
    let was_killed = status.lines().any(|line| {
        let set = line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:"));
        set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
            .is_some_and(|set| set & SIGKILL_BIT != 0)
    });
    (!has_ended && flags & FLAG_EXITING == 0 && !was_killed).then(|| command.to_owned())
}

/// Has a file system that would write elsewhere (btrfs) write in place, or the space that is taken
/// is not that which is written to. Others have no such flag, and refuse it.
fn set_in_place(file: &File) {
    if let Ok(flags) = rustix::fs::ioctl_getflags(file) {
        let _ = rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW);
    }
}

/// Lets the file's I/O bypass the page cache, and says what offsets have to be multiples of then.
fn set_direct(file: &File) -> Option<usize> {
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    let Alignment { memory_bytes, offset_bytes } = direct::alignment(file)?;
    // Buffers are aligned to pages.
    if offset_bytes > HEADER_SPACE_BYTES || memory_bytes > rustix::param::page_size() {
        return None;
    }
    rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).ok()?;
    Some(offset_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCKS: &str = "\
1: POSIX  ADVISORY  READ 11 fe:00:501 128 128\n\
2: FLOCK  ADVISORY  WRITE 0 fe:00:502 0 EOF\n\
2: -> FLOCK  ADVISORY  WRITE 77 fe:00:503 0 EOF\n\
3: FLOCK  ADVISORY  WRITE 41 07:01:503 0 EOF\n\
4: FLOCK  ADVISORY  WRITE 42 fe:00:503 0 EOF\n";

    #[test]
    fn the_holder_is_found_by_the_inode() {
        let [device, other] = [(0xfe, 0), (7, 1)].map(|(a, b)| rustix::fs::makedev(a, b));
        assert_eq!(holder_in(LOCKS, device, 503), Some(42));
        assert_eq!(holder_in(LOCKS, other, 503), Some(41), "of the same number on another drive");
        assert_eq!(holder_in(LOCKS, device, 502), None, "has ended");
        assert_eq!(holder_in(LOCKS, device, 501), None, "another kind of lock");
        assert_eq!(holder_in("", device, 503), None);
    }

    #[test]
    fn a_process_that_was_killed_holds_nothing() {
        let stat = |state, flags| format!("42 (py (3) n) {state} 1 42 42 0 -1 {flags} 0 0 0");
        let status = |set| format!("Name:\tpy\nSigPnd:\t{set}\nShdPnd:\t0000000000000000\n");
        let (none, kill) = ("0000000000000000", "0000000000000100");
        assert_eq!(running(&stat('S', 4_194_304), &status(none)), Some("py (3) n".to_owned()));
        for (stat, status) in [
            (stat('Z', 4_194_304), status(none)),
            (stat('D', 4_194_308), status(none)),
            (stat('D', 4_194_304), status(kill)),
        ] {
            assert_eq!(running(&stat, &status), None, "{stat}");
        }
        // This process, as the kernel writes it.
        let [stat, status] = ["stat", "status"]
            .map(|file| fs::read_to_string(format!("/proc/self/{file}")).expect("proc"));
        assert!(running(&stat, &status).is_some());
    }
}
