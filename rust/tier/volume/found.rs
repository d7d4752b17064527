//! Volumes that lie on drives: what is there, and how it is removed.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::io::Errno;

use super::{
    Location,
    block_device::{self, Contents as OnDevice, Space},
    format::{self, Extents, Header, NoHeader, VolumeId},
    headers,
    member::{self, Member},
};
use crate::{
    Error, Result,
    tier::io::disk::{open_regular, read_all},
};

/// The file or the device of a member, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where it is.
    pub path: PathBuf,
    /// The drive, as a volume is given it: the folder of the file, or the device.
    pub drive: PathBuf,
    /// The name of its volume.
    pub name: String,
    /// The number of the member, by the file's name.
    pub member: usize,
    /// Bytes of the file; of a device those that the volume takes.
    pub nbytes: u64,
    /// The process that uses it, if it can be seen.
    pub holder: Option<String>,
    /// What its header says; nothing where it has none that is whole: it was never completely made,
    /// is damaged, or is none of ours.
    pub contents: Option<Contents>,
}

/// What the header of a member says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// What all members of one volume share, and no other volume has.
    pub volume: u128,
    /// The number of the member.
    pub member: usize,
    /// How many members the volume has.
    pub num_members: usize,
    /// How many records the volume has.
    pub num_records: u64,
}

impl Contents {
    fn of(header: &Header) -> Self {
        Self {
            volume: header.volume,
            member: header.member as usize,
            num_members: header.weights.len(),
            num_records: header.num_records,
        }
    }
}

/// The members' files in a folder, by name; of a block device the member that it is, if any. Takes
/// no lock.
///
/// # Errors
/// [`Error::Os`] where the folder or the device cannot be read. A file that cannot be has no
/// contents.
pub fn list(drive: &Path) -> Result<Vec<Found>> {
    let refused =
        |error| Error::os(format!("cannot look for volumes on {}", drive.display()), error);
    if block_device::is_one(drive) {
        let device = File::open(drive).map_err(refused)?;
        return Ok(match block_device::contents(&device).map_err(refused)? {
            OnDevice::Member(header) => vec![Found {
                path: drive.to_owned(),
                drive: drive.to_owned(),
                name: header.name.clone(),
                member: header.member as usize,
                nbytes: header.extents().file_bytes(),
                holder: member::holder(&device),
                contents: Some(Contents::of(&header)),
            }],
            _ => Vec::new(),
        });
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(drive).map_err(refused)? {
        let path = entry.map_err(refused)?.path();
        let Some((name, member)) = member::parse(&path) else { continue };
        // Gone meanwhile.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let file = open_regular(&path, OpenOptions::new().read(true)).ok();
        found.push(Found {
            nbytes: metadata.len(),
            holder: file.as_ref().and_then(member::holder),
            contents: file.as_ref().and_then(contents),
            drive: drive.to_owned(),
            path,
            name,
            member,
        });
    }
    found.sort_by(|a, b| (&a.name, a.member).cmp(&(&b.name, b.member)));
    Ok(found)
}

/// Of a copy of the header that is whole.
fn contents(file: &File) -> Option<Contents> {
    let mut space = [0; Header::BYTES];
    let read = |memory: &mut [u8], offset| file.read_exact_at(memory, offset);
    let header = headers::best(headers::copies(&mut space, read)).ok()?.ok()?;
    Some(Contents::of(&header))
}

/// Removes the members' files of a volume that nobody uses, whole or not, and makes its devices
/// free; those that are missing are no error, unless all are.
///
/// # Errors
/// [`Error::Os`] where one is used, a device has something else, or none is there; nothing is
/// removed then.
pub fn remove(location: &Location, lock_timeout: Duration) -> Result<()> {
    let name = &location.name;
    let mut members = Vec::new();
    for (number, member) in open_all(location, lock_timeout)? {
        if is_member(&member, name, number)? {
            members.push(member);
        }
    }
    if members.is_empty() {
        return Err(Error::os(
            format!("cannot remove volume `{name}`: none of its members is there"),
            Errno::NOENT,
        ));
    }
    members.iter().rev().for_each(Member::remove);
    Ok(())
}

/// The members that are there, by number, locked: files, and devices whatever they have.
fn open_all(location: &Location, lock_timeout: Duration) -> Result<Vec<(usize, Member)>> {
    super::make::check_location(location)?;
    let Location { name, drives } = location;
    let mut members = Vec::with_capacity(drives.len());
    for (number, drive) in drives.iter().enumerate() {
        match Member::open(name, number, drive, lock_timeout, None) {
            Ok(member) => members.push((number, member)),
            Err(Error::Os { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(members)
}

/// Whether nothing of a volume is there, so that one can be made. What is left of one that was
/// never completely made, or not completely removed before its first commit, is removed first.
///
/// The first copy of the index proves that there was no commit. It is on member 0, which is the
/// first to be made and the last to be removed.
///
/// # Errors
/// [`Error::Os`] where a member is used, or a folder cannot be read; nothing is removed then.
pub fn is_absent(location: &Location, lock_timeout: Duration) -> Result<bool> {
    let Location { name, drives } = location;
    let mut space = Space::new();
    let (mut left, mut volumes) = (Vec::new(), Vec::new());
    for (number, member) in open_all(location, lock_timeout)? {
        match header_says(&member, name, &mut space) {
            Says::Nothing if member.is_device() => continue,
            Says::Nothing => {}
            Says::Volume(volume) => volumes.push(volume),
            Says::Other => return Ok(false),
        }
        left.push((number, member));
    }
    let index = match left.first() {
        Some((0, first)) => first_index_says(first, &mut space),
        _ => Says::Nothing,
    };
    let has_no_commit = match index {
        Says::Nothing => volumes.is_empty(),
        Says::Volume(new) => volumes.len() < drives.len() && volumes.iter().all(|&it| it == new),
        Says::Other => false,
    };
    if left.is_empty() {
        // Drives in another order have other members.
        for drive in drives {
            if list(drive)?.iter().any(|found| found.name == *name) {
                return Ok(false);
            }
        }
    }
    if has_no_commit {
        left.iter().rev().for_each(|(_, member)| member.remove());
    }
    Ok(has_no_commit)
}

/// What the beginning of a member says.
enum Says {
    /// It was never written.
    Nothing,
    /// It is of this volume; an index says so before the first commit only.
    Volume(VolumeId),
    /// Anything else, or it cannot be read.
    Other,
}

fn header_says(member: &Member, volume: &str, space: &mut Space) -> Says {
    if member.nbytes().is_ok_and(|nbytes| nbytes == 0) {
        return Says::Nothing;
    }
    let read = |memory: &mut [u8], offset| read_all(&*member.disk, memory, offset);
    match headers::copies(&mut space.0, read) {
        [Ok(Err(NoHeader::Blank)), Ok(Err(NoHeader::Blank))] => Says::Nothing,
        copies => match headers::best(copies) {
            Ok(Ok(header)) if !member.is_of_another(&header, volume) => Says::Volume(header.volume),
            // Who takes the device says what is wrong with one that has no label.
            Ok(Err(NoHeader::Label | NoHeader::Foreign)) if member.is_device() => Says::Nothing,
            _ => Says::Other,
        },
    }
}

fn first_index_says(first: &Member, space: &mut Space) -> Says {
    if first.nbytes().is_ok_and(|nbytes| nbytes == 0) {
        return Says::Nothing;
    }
    let block = &mut space.0[..first.block_bytes()];
    match read_all(&*first.disk, block, Extents::FIRST_INDEX_OFFSET) {
        Ok(()) if block.iter().all(|&byte| byte == 0) => Says::Nothing,
        Ok(()) => match format::decode_head(block) {
            // The first commit is of generation 2, and written there.
            Some((head, ..)) if head.generation == 0 => Says::Volume(head.volume),
            _ => Says::Other,
        },
        Err(_) => Says::Other,
    }
}

/// Whether it is this member: a device may also be free.
fn is_member(member: &Member, name: &str, number: usize) -> Result<bool> {
    let shown = member.path.display();
    let contents = member
        .device_contents()
        .map_err(|error| Error::os(format!("cannot look at {shown}"), error))?;
    match contents {
        None => Ok(true),
        Some(OnDevice::Free) => Ok(false),
        Some(OnDevice::Member(header))
            if header.name == name && header.member as usize == number =>
        {
            Ok(true)
        }
        Some(_) => Err(Error::os(
            format!(
                "cannot remove volume `{name}`: {shown} is not its member `{number}`\nhint: \
                 `stepwell volume ls {shown}`"
            ),
            Errno::BADMSG,
        )),
    }
}
