//! A member's file, or the block device that is one: made, found again, locked, removed.
//!
//! - MBR-1 The space of a file is taken when it is made. A full drive is an error there. (What
//!   shares space among snapshots can still be full later. That is an error of the write then.)
//! - MBR-2 A file is locked by the description through which all of its I/O goes (`flock`). The
//!   kernel holds that description until the last I/O through it has ended, also that of a process
//!   that was killed. So who has the lock is alone, and nothing that was submitted before lands
//!   later: the lock is the fence.
//! - MBR-3 I/O bypasses the page cache (`O_DIRECT`) where the file system can. What it asks of
//!   offsets is found out, and a volume's block is a multiple of it.
//! - MBR-4 Of a device all of it is taken when it is large enough. What it has before, and what is
//!   left on it, is said in `block_device.rs`.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, IFlags, OFlags},
    io::Errno,
};

use super::{
    block_device::{self, Contents},
    format::{BLOCK_BYTES_MIN, HEADER_SPACE_BYTES, Header},
};
use crate::{
    Error, Result,
    tier::io::{
        direct::{self, Alignment},
        disk::{Between, Disk, open_regular},
        queue::Target,
    },
};

/// Between two tries of a lock whose holder has ended.
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// A holder that still runs after this is not about to end: between a signal and its effect a
/// process looks like any other.
const HOLDER_GRACE: Duration = Duration::from_millis(100);

/// How long a device may take to be made free, when its volume ends.
const LABEL_TIMEOUT: Duration = Duration::from_secs(10);

/// Where a member's file can be neither made nor written.
const READ_ONLY_HINT: &str = "its file system is mounted read-only";

/// Set in the flags of a process that is ending (`PF_EXITING`).
const FLAG_EXITING: u64 = 4;

/// SIGKILL in a set of signals.
const SIGKILL_BIT: u64 = 1 << 8;

/// The file or the device of a member.
pub(super) struct Member {
    pub(super) path: PathBuf,
    pub(super) file: Arc<File>,
    is_device: bool,
    /// The file, or what stands between.
    pub(super) disk: Arc<dyn Disk>,
    /// What offsets have to be multiples of; `None` where the page cache is between.
    direct_bytes: Option<usize>,
}

/// The file of a member: on a drive that is a folder by its name, else the device itself.
fn path(drive: &Path, name: &str, member: usize) -> PathBuf {
    if block_device::is_one(drive) {
        return drive.to_owned();
    }
    drive.join(format!("{name}.{member}.stepwell"))
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
    /// Makes the file, locked and empty; or takes a device that is free, and waits up to `timeout`
    /// for the last writes to it of a process that has ended.
    pub(super) fn create(
        volume: &str,
        number: usize,
        drive: &Path,
        timeout: Duration,
        between: Option<&Between>,
    ) -> Result<Self> {
        let path = path(drive, volume, number);
        let named = named(volume, number, &path);
        if block_device::is_one(drive) {
            let file = lock_device(&named, &path, timeout)?;
            check_free(&named, &file)?;
            return Ok(Self::new(number, path, file, true, between));
        }
        let refused = |error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    "another job's, or kept: open it, remove it, or choose another name"
                }
                io::ErrorKind::NotFound => "the folder has to be there",
                io::ErrorKind::ReadOnlyFilesystem => READ_ONLY_HINT,
                _ => "it has to be a folder that this process may write to",
            };
            Error::os(format!("cannot make {named}; hint: {hint}"), error)
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(refused)?;
        set_in_place(&file);
        let member = Self::new(number, path.clone(), file, false, between);
        // Nothing else knows the file, unless it opened it this moment to look whether it is one.
        match try_lock(&member.file) {
            Ok(()) => Ok(member),
            Err(error) => {
                member.remove();
                Err(refused(error))
            }
        }
    }

    fn new(
        number: usize,
        path: PathBuf,
        file: File,
        is_device: bool,
        between: Option<&Between>,
    ) -> Self {
        let direct_bytes = set_direct(&file, is_device);
        let file = Arc::new(file);
        let disk: Arc<dyn Disk> = match between {
            Some(between) => between(number, Arc::clone(&file)),
            None => Arc::clone(&file) as _,
        };
        Self { path, file, is_device, disk, direct_bytes }
    }

    /// Opens the file or the device of a volume that was made before, and locks it. Where the
    /// process that holds the lock has ended, waits up to `timeout` for its last writes.
    pub(super) fn open(
        volume: &str,
        number: usize,
        drive: &Path,
        timeout: Duration,
        between: Option<&Between>,
    ) -> Result<Self> {
        let path = path(drive, volume, number);
        let named = named(volume, number, &path);
        if block_device::is_one(drive) {
            let file = lock_device(&named, &path, timeout)?;
            return Ok(Self::new(number, path, file, true, between));
        }
        let refused = |error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::NotFound => {
                    "it is missing: name the drives that it was made with, in their order"
                }
                io::ErrorKind::ReadOnlyFilesystem => READ_ONLY_HINT,
                _ => "it has to be a file that this process may read and write",
            };
            Error::os(format!("cannot open {named}; hint: {hint}"), error)
        };
        let mut how = OpenOptions::new();
        let file = open_regular(&path, how.read(true).write(true)).map_err(refused)?;
        let member = Self::new(number, path, file, false, between);
        lock_within(&named, timeout, || try_lock(&member.file), || holder(&member.file))?
            .map_err(refused)?;
        if member.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0) {
            return Err(Error::os(
                format!("{named} was removed by the process that used it"),
                Errno::NOENT,
            ));
        }
        Ok(member)
    }

    /// What a device has, if it is one.
    pub(super) fn device_contents(&self) -> io::Result<Option<Contents>> {
        self.is_device.then(|| block_device::contents(&self.file)).transpose()
    }

    pub(super) fn is_device(&self) -> bool {
        self.is_device
    }

    /// Whether a header names another volume than the one whose member this is. The volume of a
    /// file is the one that the file's name says.
    pub(super) fn is_of_another(&self, header: &Header, volume: &str) -> bool {
        self.is_device && header.name != volume
    }

    /// Bytes that there are.
    pub(super) fn nbytes(&self) -> io::Result<u64> {
        if self.is_device {
            return block_device::nbytes(&self.file);
        }
        Ok(self.file.metadata()?.len())
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
            let free = match self.is_device {
                true => self.nbytes().ok(),
                false => {
                    rustix::fs::fstatvfs(&*self.file).ok().map(|stat| stat.f_bavail * stat.f_frsize)
                }
            };
            let free = free.map_or("unknown".to_owned(), |free| free.to_string());
            Error::os(
                format!(
                    "cannot take `{nbytes}` bytes for {}, `{free}` are free; hint: `durability` \
                     none takes half the space, and moments of `q8` a third",
                    named(volume, number, &self.path)
                ),
                error,
            )
        };
        if self.is_device {
            return match self.nbytes() {
                Ok(there) if there >= nbytes => Ok(()),
                Ok(_) => Err(no_room(Errno::NOSPC.into())),
                Err(error) => Err(no_room(error)),
            };
        }
        self.disk.allocate(nbytes).map_err(no_room)
    }

    /// Makes the file's name durable. A device has its own.
    pub(super) fn sync_folder(&self) -> io::Result<()> {
        if self.is_device {
            return Ok(());
        }
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        File::open(folder)?.sync_all()
    }

    /// Whether the file still has a name: what a commit writes is found by it. A device is found by
    /// any of its names.
    pub(super) fn check_name(&self, volume: &str, number: usize) -> Result<()> {
        if self.is_device {
            return Ok(());
        }
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

    /// Removes the file's name, where it is still this file's; makes a device free.
    pub(super) fn remove(&self) {
        if self.is_device {
            if let Err(error) = self.set_free() {
                log::warn!(
                    target: "stepwell",
                    "cannot make {} free ({error}): the volume stays on it; hint: stepwell volume \
                     rm {0}",
                    self.path.display()
                );
            }
            return;
        }
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

    /// Writes a device's label. One that hangs holds up a thread of its own, and not the caller.
    fn set_free(&self) -> io::Result<()> {
        let (tell, told) = mpsc::channel();
        let file = Arc::clone(&self.file);
        std::thread::Builder::new().name("stepwell-label".to_owned()).spawn(move || {
            // The caller may have gone on.
            let _ = tell.send(block_device::write_label(&file));
        })?;
        told.recv_timeout(LABEL_TIMEOUT).unwrap_or(Err(Errno::TIMEDOUT.into()))
    }

    /// Gives the lock back, also where a forked child holds the file open.
    pub(super) fn unlock(&self) {
        let _ = rustix::fs::flock(&*self.file, FlockOperation::Unlock);
    }
}

fn try_lock(file: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// Opens a device that nothing uses, and locks it, so that others see who has it.
fn lock_device(named: &str, path: &Path, timeout: Duration) -> Result<File> {
    if let Some(at) = block_device::mounted_at(path) {
        return Err(Error::os(
            format!("{named} is mounted at {at}; hint: a folder there can be a member"),
            Errno::BUSY,
        ));
    }
    let claim = || match block_device::claim(path) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(Errno::AGAIN.into()),
        claimed => claimed.and_then(|file| try_lock(&file).map(|()| file)),
    };
    // Only to ask who has it: without a claim.
    let holder = || File::open(path).ok().as_ref().and_then(holder);
    lock_within(named, timeout, claim, holder)?.map_err(|error| {
        Error::os(
            format!(
                "cannot open {named}; hint: it has to be a block device that this process may read \
                 and write"
            ),
            error,
        )
    })
}

/// Checks that a device is free.
fn check_free(named: &str, device: &File) -> Result<()> {
    let contents = block_device::contents(device)
        .map_err(|error| Error::os(format!("cannot read {named}"), error))?;
    let what = match contents {
        Contents::Free => return Ok(()),
        Contents::Member(header) => format!(
            "has member `{}` of volume `{}`; hint: another job's, or kept: open it, or remove it \
             (`stepwell volume rm`)",
            header.member, header.name
        ),
        Contents::Unknown => {
            "has a volume that is damaged, or of another version; hint: `stepwell \
                              volume format --overwrite` makes it free"
                .to_owned()
        }
        Contents::Other => "was not prepared for volumes; hint: `stepwell volume format` does \
                            that, and what is on it is lost"
            .to_owned(),
    };
    Err(Error::os(format!("{named} {what}"), Errno::EXIST))
}

/// Tries until nothing is in the way: `EAGAIN` says that something is. Waits for what cannot be
/// seen, the last writes of a process that has ended, up to `timeout`.
fn lock_within<T>(
    named: &str,
    timeout: Duration,
    mut try_lock: impl FnMut() -> io::Result<T>,
    holder: impl Fn() -> Option<String>,
) -> Result<io::Result<T>> {
    let begin = Instant::now();
    let mut has_warned = false;
    loop {
        let error = match try_lock() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => error,
            done => return Ok(done),
        };
        if begin.elapsed() >= HOLDER_GRACE
            && let Some(holder) = holder()
        {
            return Err(Error::os(
                format!("{named} is used by {holder}; hint: one job at a time uses a volume"),
                Errno::BUSY,
            ));
        }
        if begin.elapsed() >= timeout {
            return Err(Error::os(
                format!(
                    "{named} is locked, and not by a process that can be seen from here, after \
                     `{:.1}` s; hint: writes of a process that was killed are still on their way \
                     to the drive, a forked child of it still runs, or a process of another \
                     container uses it; of a device a part may be mounted, or swap, LVM or RAID \
                     use it",
                    timeout.as_secs_f64()
                ),
                error,
            ));
        }
        if !has_warned && begin.elapsed() > Duration::from_secs(1) {
            has_warned = true;
            log::warn!(
                target: "stepwell",
                "{named}: waiting for the last writes of a process that has ended, up to {:.0} s",
                timeout.as_secs_f64()
            );
        }
        std::thread::sleep(LOCK_RETRY);
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
fn set_direct(file: &File, is_device: bool) -> Option<usize> {
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    let Alignment { memory_bytes, offset_bytes } = direct::alignment(file)?;
    let logical_bytes = if is_device { block_device::block_bytes(file).ok()? } else { 1 };
    let offset_bytes = offset_bytes.max(logical_bytes);
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
