//! Block devices as members: claimed, labelled, told apart.
//!
//! A device has room for one member, from its first byte on. What lies behind it is left alone.
//! A volume uses devices that have a **label**, which [`format()`] writes where a header would be.
//!
//! - DEV-1 Only [`format()`] writes to a device that has neither a label nor a header of ours.
//! - DEV-2 A device is opened with `O_EXCL`. The kernel refuses it where it is mounted, or where
//!   swap, LVM, RAID or another volume has it, under any of its names. The claim ends with the last
//!   I/O through it, as the lock of a file does (MBR-2).
//! - DEV-3 A label has the place of the header, in two copies. A volume that is made writes the
//!   header over them last; one that is removed writes them over the header. In between, and after
//!   a crash there, the device counts as the volume's: one copy of the header is whole.
//! - DEV-4 Its size and what it asks of offsets are the kernel's word.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    fs::{OFlags, SeekFrom},
    io::Errno,
};

use super::{
    format::{self, Extents, HEADER_SPACE_BYTES, Header, NoHeader},
    headers,
};
use crate::{Error, Result};

/// What [`format()`] looks at, and clears, at either end of a device: where file systems, partition
/// tables, RAID and LVM have what they are found by.
const END_BYTES: u64 = 4 << 20;

/// For so long the kernel may have a device that a process has just closed.
const CLAIM_GRACE: Duration = Duration::from_secs(2);

/// Between two tries.
const CLAIM_RETRY: Duration = Duration::from_millis(5);

/// Room for a header, at an address that direct I/O takes.
#[repr(C, align(65536))]
pub(super) struct Space(pub(super) [u8; HEADER_SPACE_BYTES]);

impl Space {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; HEADER_SPACE_BYTES]))
    }
}

/// What a device has.
#[derive(Debug)]
pub(super) enum Contents {
    /// A label: it is free.
    Free,
    /// A header of ours.
    Member(Box<Header>),
    /// A header that is damaged in both copies, or of another version.
    Unknown,
    /// Neither.
    Other,
}

/// Whether the path is a block device's.
pub(super) fn is_one(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Opens a device for this process alone. `EBUSY`: something has it.
pub(super) fn claim(path: &Path) -> io::Result<File> {
    let flags = OFlags::EXCL.bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    match file.metadata()?.file_type().is_block_device() {
        true => Ok(file),
        // Without `O_EXCL`'s meaning, nothing is claimed.
        false => Err(Errno::NOTBLK.into()),
    }
}

fn claim_soon(path: &Path) -> io::Result<File> {
    let begin = Instant::now();
    loop {
        match claim(path) {
            Err(error)
                if error.kind() == io::ErrorKind::ResourceBusy
                    && mounted_at(path).is_none()
                    && begin.elapsed() < CLAIM_GRACE =>
            {
                std::thread::sleep(CLAIM_RETRY);
            }
            done => return done,
        }
    }
}

/// Where a device is mounted, as far as this process sees it.
pub(super) fn mounted_at(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.rdev();
    mounted_in(&fs::read_to_string("/proc/self/mountinfo").ok()?, device)
}

/// Of the text of `mountinfo`.
fn mounted_in(mounts: &str, device: u64) -> Option<String> {
    let expected = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(2);
        (words.next()? == expected).then_some(())?;
        words.nth(1).map(str::to_owned)
    })
}

/// Bytes of a device.
pub(super) fn nbytes(file: &File) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

/// Bytes of its logical block.
pub(super) fn block_bytes(file: &File) -> io::Result<usize> {
    Ok(rustix::fs::ioctl_blksszget(file)? as usize)
}

/// What is on it.
pub(super) fn contents(file: &File) -> io::Result<Contents> {
    let mut space = Space::new();
    let read = |memory: &mut [u8], offset| file.read_exact_at(memory, offset);
    match headers::best(headers::copies(&mut space.0, read)) {
        // Of a device that is smaller than that.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Contents::Other),
        copy => Ok(match copy? {
            Ok(header) => Contents::Member(Box::new(header)),
            Err(NoHeader::Damaged | NoHeader::Version(_)) => Contents::Unknown,
            Err(NoHeader::Label) => Contents::Free,
            Err(NoHeader::Foreign | NoHeader::Blank) => Contents::Other,
        }),
    }
}

/// Makes it free: whatever volume it had is gone.
pub(super) fn write_label(file: &File) -> io::Result<()> {
    let mut space = Space::new();
    format::encode_label(&mut space.0);
    for copy in 0..2 {
        file.write_all_at(&space.0, Extents::header_offset(copy))?;
    }
    file.sync_data()
}

/// Prepares a block device for volumes: writes its label. Everything on it is lost.
///
/// # Errors
/// [`Error::Value`] for another file, a device that is too small, or, unless `overwrite` is given,
/// one that has anything in its first or last 4 MiB, such as a file system, a partition table or a
/// volume; [`Error::Os`] where something uses it or it cannot be written.
pub fn format(path: &Path, overwrite: bool) -> Result<()> {
    let shown = path.display();
    if !is_one(path) {
        return Err(Error::value(format!("`{shown}` is to be formatted, expected a block device")));
    }
    let failed = |error: io::Error| {
        let what = match (error.raw_os_error().map(Errno::from_raw_os_error), mounted_at(path)) {
            (Some(Errno::BUSY), Some(at)) => format!("; hint: it is mounted at {at}"),
            (Some(Errno::BUSY), None) => {
                "; hint: a part of it is mounted, or swap, LVM, RAID or a volume uses it".to_owned()
            }
            _ => String::new(),
        };
        Error::os(format!("cannot format {shown}{what}"), error)
    };
    let file = claim_soon(path).map_err(failed)?;
    let end = nbytes(&file).map_err(failed)?;
    if end < 2 * END_BYTES {
        return Err(Error::value(format!(
            "{shown} has `{end}` bytes, expected {} or more",
            2 * END_BYTES
        )));
    }
    let found = contents(&file).map_err(failed)?;
    let is_free = matches!(found, Contents::Free) || is_blank(&file, end).map_err(failed)?;
    if !is_free && !overwrite {
        let what = match found {
            Contents::Member(header) => {
                format!("has member `{}` of volume `{}`", header.member, header.name)
            }
            _ => "is not empty: a file system, a partition table or other data is there".to_owned(),
        };
        return Err(Error::value(format!(
            "{shown} {what}, expected nothing\nhint: look at it (`lsblk --fs {shown}`); `stepwell \
             volume format --overwrite` formats it all the same, and what is there is lost"
        )));
    }
    if !is_free {
        let zeros = Space::new();
        for begin in [0, end - END_BYTES] {
            for offset in (begin..begin + END_BYTES).step_by(HEADER_SPACE_BYTES) {
                file.write_all_at(&zeros.0, offset).map_err(failed)?;
            }
        }
    }
    write_label(&file).map_err(failed)
}

/// Whether both ends of a device are zeros.
fn is_blank(file: &File, end: u64) -> io::Result<bool> {
    let mut space = Space::new();
    for begin in [0, end - END_BYTES] {
        for offset in (begin..begin + END_BYTES).step_by(HEADER_SPACE_BYTES) {
            file.read_exact_at(&mut space.0, offset)?;
            if space.0.iter().any(|&byte| byte != 0) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_the_device() {
        let mounts = "26 1 254:0 / / rw,relatime - ext4 /dev/root rw\n\
                      40 26 7:3 / /mnt/a\\040b rw - xfs /dev/loop3 rw\n";
        let device = |major, minor| rustix::fs::makedev(major, minor);
        assert_eq!(mounted_in(mounts, device(7, 3)).as_deref(), Some("/mnt/a\\040b"));
        assert_eq!(mounted_in(mounts, device(254, 0)).as_deref(), Some("/"));
        assert_eq!(mounted_in(mounts, device(7, 4)), None);
    }
}
