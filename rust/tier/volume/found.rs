//! Volumes that lie on drives: what is there, and how it is removed.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::io::Errno;

use super::{
    Location,
    block_device::{self, Contents as OnDevice},
    format::{Extents, Header, NoHeader},
    member::{self, Member},
};
use crate::{Error, Result};

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
        let file = File::open(&path).ok();
        found.push(Found {
            nbytes: metadata.len(),
            holder: file.as_ref().and_then(member::holder),
            contents: file.and_then(|file| contents(&file).ok().flatten()),
            drive: drive.to_owned(),
            path,
            name,
            member,
        });
    }
    found.sort_by(|a, b| (&a.name, a.member).cmp(&(&b.name, b.member)));
    Ok(found)
}

/// Of the copy of the header that is whole.
fn contents(file: &File) -> io::Result<Option<Contents>> {
    for copy in 0..2 {
        let mut bytes = [0; Header::BYTES];
        file.read_exact_at(&mut bytes, Extents::header_offset(copy))?;
        match Header::decode(&bytes) {
            Err(NoHeader::Foreign | NoHeader::Damaged | NoHeader::Version(_)) => {}
            Ok(header) => return Ok(Some(Contents::of(&header))),
        }
    }
    Ok(None)
}

/// Removes the members' files of a volume that nobody uses, whole or not, and makes its devices
/// free; those that are missing are no error, unless all are.
///
/// # Errors
/// [`Error::Os`] where one is used, a device has something else, or none is there; nothing is
/// removed then.
pub fn remove(location: &Location, lock_timeout: Duration) -> Result<()> {
    super::make::check_location(location)?;
    let Location { name, drives } = location;
    let mut members = Vec::with_capacity(drives.len());
    for (number, drive) in drives.iter().enumerate() {
        match Member::open(name, number, drive, lock_timeout, None) {
            Ok(member) if is_member(&member, name, number)? => members.push(member),
            Ok(_) => {}
            Err(Error::Os { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    if members.is_empty() {
        return Err(Error::os(
            format!("cannot remove volume `{name}`: none of its members is there"),
            Errno::NOENT,
        ));
    }
    members.iter().for_each(Member::remove);
    Ok(())
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
