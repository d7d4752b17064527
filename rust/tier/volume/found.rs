//! Volumes that lie in folders: what is there, and how it is removed.

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
    format::{Extents, Header, NoHeader},
    member::{self, Member},
};
use crate::{Error, Result};

/// The file of a member, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where it is.
    pub path: PathBuf,
    /// The name of its volume.
    pub name: String,
    /// The number of the member, by the file's name.
    pub member: usize,
    /// Bytes of the file.
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

/// The members' files in a folder, by name. Takes no lock.
///
/// # Errors
/// [`Error::Os`] where the folder cannot be read. A file that cannot be has no contents.
pub fn list(folder: &Path) -> Result<Vec<Found>> {
    let refused =
        |error| Error::os(format!("cannot look for volumes in {}", folder.display()), error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(refused)? {
        let path = entry.map_err(refused)?.path();
        let Some((name, member)) = member::parse(&path) else { continue };
        // Gone meanwhile.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let file = File::open(&path).ok();
        found.push(Found {
            nbytes: metadata.len(),
            holder: file.as_ref().and_then(member::holder),
            contents: file.and_then(|file| contents(&file).ok().flatten()),
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
            Ok(header) => {
                return Ok(Some(Contents {
                    volume: header.volume,
                    member: header.member as usize,
                    num_members: header.weights.len(),
                    num_records: header.num_records,
                }));
            }
        }
    }
    Ok(None)
}

/// Removes the members' files of a volume that nobody uses, whole or not; those that are missing
/// are no error, unless all are.
///
/// # Errors
/// [`Error::Os`] where one is used, or none is there; nothing is removed then.
pub fn remove(location: &Location, lock_timeout: Duration) -> Result<()> {
    super::make::check_location(location)?;
    let Location { name, folders } = location;
    let mut members = Vec::with_capacity(folders.len());
    for (number, folder) in folders.iter().enumerate() {
        match Member::open(name, number, folder, lock_timeout, None) {
            Ok(member) => members.push(member),
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
