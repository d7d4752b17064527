//! How a volume is made, and found again.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::AtomicU64},
};

use rustix::io::Errno;

use super::{
    Durability, Location, Options, Shape, Volume,
    buffers::Buffers,
    bytes_of,
    commit::Image,
    config::random,
    flushes::Flushes,
    format::{self, Entry, Extents, HEADER_SPACE_BYTES, Head, Header, NAME_BYTES_MAX, NoHeader},
    geometry::{Geometry, MEMBERS_MAX, Piece, STRIPE_BYTES_MAX},
    headers,
    ledger::Ledger,
    member::Member,
    ticket::About,
};
use crate::{
    Error, Result,
    host::{
        memory::{Buffer, BufferConfig, check_free},
        pool::Pool,
    },
    tier::io::{
        EngineKind,
        disk::{read_all, write_all},
        engine::{Engine, QUEUE_DEPTH_MAX},
    },
};

/// What lists in memory have of a record, but for its stripes.
const RECORD_BYTES: u64 = 128;

/// The members, which are removed, and devices free, again unless the volume comes to be.
struct Made(Vec<Member>);

impl Drop for Made {
    fn drop(&mut self) {
        self.0.iter().rev().for_each(Member::remove);
    }
}

/// What a volume is made of, apart from its files.
struct Parts {
    about: About,
    durability: Durability,
    ledger: Ledger,
    image: Buffer,
    step_before: Option<u64>,
}

impl Volume {
    /// Makes a volume and takes its space. No record is written yet, no step committed.
    ///
    /// # Errors
    /// [`Error::Value`] for arguments that cannot work; [`Error::Os`] where a member's file cannot
    /// be made or a drive is full. Nothing is left behind then.
    pub fn create(
        location: &Location,
        shape: &Shape,
        options: &Options,
        pool: &Pool,
    ) -> Result<Self> {
        check_location(location)?;
        let Location { name, drives } = location;
        let entries = check_shape(shape, drives.len(), options)?;
        let mut made = Made(Vec::with_capacity(drives.len()));
        for (number, drive) in drives.iter().enumerate() {
            let (timeout, between) = (options.lock_timeout, options.between.as_ref());
            made.0.push(Member::create(name, number, drive, timeout, between)?);
        }
        let (headers, geometry) = design(name, shape, &made.0, &entries)?;
        for (number, (member, header)) in made.0.iter().zip(&headers).enumerate() {
            member.allocate(name, number, header.extents().file_bytes())?;
        }
        let mut image = image_for(&headers[0], pool)?;
        let about = About::new(name, &headers, &made.0, geometry);
        let mut head = Head { volume: about.id, generation: 0, step: None };
        match shape.durability {
            Durability::None => made.0.iter().for_each(Member::remove),
            Durability::Commit => {
                for generation in 0..2 {
                    head.generation = generation;
                    index_of(&about, &made.0, &mut image).write(head, entries.iter().copied())?;
                }
                // Last: what has a header is a volume.
                write_headers(&about, &made.0, &headers, pool)?;
            }
        }
        let ledger = Ledger::new(name.clone(), head, headers[0].slots, entries);
        let parts = Parts { about, durability: shape.durability, ledger, image, step_before: None };
        Self::start(parts, &mut made.0, options, pool)
    }

    /// Opens a volume that was kept, or left by a process that has ended, at its last committed
    /// step, or at the one before ([`Options::step`]), which is the last one then. Its drives are
    /// given in the order that it was made with.
    ///
    /// # Errors
    /// [`Error::Value`] for arguments that cannot work, or a step that it is not at; [`Error::Os`]
    /// where a member is missing, used by another process, truncated, damaged or another one's.
    pub fn open(location: &Location, options: &Options, pool: &Pool) -> Result<Self> {
        check_location(location)?;
        let Location { name, drives } = location;
        let mut members = Vec::with_capacity(drives.len());
        for (number, drive) in drives.iter().enumerate() {
            let (timeout, between) = (options.lock_timeout, options.between.as_ref());
            members.push(Member::open(name, number, drive, timeout, between)?);
        }
        let headers = read_headers(name, &members, pool)?;
        let num_records = headers[0].num_records as usize;
        // The places of records follow from their sizes, which are in the index.
        let about = About::new(name, &headers, &members, Geometry::empty());
        let mut block = header_space(pool)?;
        index_of(&about, &members, &mut block).check_heads(about.id, num_records)?;
        check_records(num_records)?;
        let mut image = image_for(&headers[0], pool)?;
        let mut index = index_of(&about, &members, &mut image);
        let (head, step_before, entries) = index.find(about.id, num_records, options.step)?;
        let Header { weights, stripe_bytes, block_bytes, slots, .. } = &headers[0];
        let geometry = geometry_of(&entries, weights, *stripe_bytes as usize, *block_bytes)?;
        let slot_bytes = headers.iter().map(|header| header.slot_bytes);
        if !geometry.member_nbytes().iter().copied().eq(slot_bytes)
            || entries.iter().any(|entry| entry.slot >= *slots && entry.slot != Entry::NOWHERE)
        {
            return Err(Error::os(
                format!("the index of volume `{name}` does not fit its headers"),
                Errno::BADMSG,
            ));
        }
        let about = About { geometry, ..about };
        let ledger = Ledger::new(name.clone(), head, *slots, entries);
        let durability = Durability::Commit;
        let parts = Parts { about, durability, ledger, image, step_before };
        Self::start(parts, &mut members, options, pool)
    }

    /// Takes the members once nothing can fail any more.
    fn start(
        parts: Parts,
        members: &mut Vec<Member>,
        options: &Options,
        pool: &Pool,
    ) -> Result<Self> {
        let Parts { about, durability, ledger, image, step_before } = parts;
        let name = &about.name;
        if let Some(member) = members.iter().find(|member| !member.is_direct()) {
            log::warn!(
                target: "stepwell",
                "volume `{name}`: the file system of {} has no O_DIRECT, so records are copied \
                 through the page cache, which takes memory beside the buffers",
                member.path.display()
            );
        }
        if !(1..=QUEUE_DEPTH_MAX).contains(&options.queue_depth) {
            return Err(Error::value(format!(
                "queue_depth is `{}`, expected 1 to {QUEUE_DEPTH_MAX}",
                options.queue_depth
            )));
        }
        let records = 0..ledger.num_records();
        let record_bytes = records.clone().map(|record| about.stored_nbytes(record)).max();
        let pieces = records.map(|record| about.geometry.pieces(record).len()).max();
        let buffers = Buffers::new(options.num_buffers, record_bytes.unwrap_or(1), pool)?;
        let engine = Engine::start(
            // Only calls can be stood between.
            if options.between.is_some() { EngineKind::Positional } else { options.engine },
            &format!("volume `{name}`"),
            &members.iter().map(|member| Some(member.target())).collect::<Vec<_>>(),
            &buffers
                .all()
                .map(|(begin, nbytes)| (begin.expose_provenance(), nbytes))
                .collect::<Vec<_>>(),
            options.queue_depth,
            // A flush of a step, and one of a commit.
            options.num_buffers * pieces.unwrap_or(0) + 2,
        )?;
        let flushes = match durability {
            Durability::Commit => Some(Flushes::new(members.len(), options.flush_bytes)),
            Durability::None => None,
        };
        Ok(Self {
            about: Arc::new(about),
            durability,
            members: std::mem::take(members),
            ledger: Arc::new(Mutex::new(ledger)),
            buffers,
            engine,
            image: Arc::new(Mutex::new(image)),
            flushes,
            step_before,
            flushes_now: true.into(),
            keep: options.keep.into(),
            io_timeout: options.io_timeout,
            pid: std::process::id(),
            bytes_read: AtomicU64::new(0),
            bytes_written: AtomicU64::new(0),
        })
    }
}

impl About {
    fn new(name: &str, headers: &[Header], members: &[Member], geometry: Geometry) -> Self {
        Self {
            id: headers[0].volume,
            name: name.to_owned(),
            paths: members.iter().map(|member| member.path.clone()).collect(),
            geometry,
            extents: headers.iter().map(Header::extents).collect(),
        }
    }
}

fn index_of<'a>(about: &'a About, members: &'a [Member], image: &'a mut Buffer) -> Image<'a> {
    Image { bytes: bytes_of(image), volume_name: &about.name, members, extents: &about.extents }
}

fn image_for(header: &Header, pool: &Pool) -> Result<Buffer> {
    let nbytes = header.extents().index_bytes;
    let nbytes = usize::try_from(nbytes).map_err(|_| {
        Error::value(format!("an index of `{nbytes}` bytes does not fit into memory"))
    })?;
    Buffer::new(nbytes, &BufferConfig::default(), pool)
}

pub(super) fn check_location(Location { name, drives }: &Location) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !(1..=NAME_BYTES_MAX).contains(&name.len())
        || name.starts_with('.')
        || !name.chars().all(is_plain)
    {
        return Err(Error::value(format!(
            "the name of a volume is `{name}`, expected 1 to {NAME_BYTES_MAX} letters, digits, \
             `.`, `_` and `-`, and no `.` first"
        )));
    }
    if !(1..=MEMBERS_MAX).contains(&drives.len()) {
        return Err(Error::value(format!(
            "volume `{name}` has `{}` drives, expected 1 to {MEMBERS_MAX}",
            drives.len()
        )));
    }
    let mut seen = BTreeSet::new();
    for (number, drive) in drives.iter().enumerate() {
        let found: PathBuf = drive.canonicalize().map_err(|error| {
            Error::os(
                format!(
                    "cannot use the drive of member `{number}` of volume `{name}` ({})",
                    drive.display()
                ),
                error,
            )
        })?;
        if !seen.insert(found) {
            return Err(Error::value(format!(
                "the drive of member `{number}` of volume `{name}` ({}) is another member's too\n\
                 hint: one folder on each drive, or the device",
                drive.display()
            )));
        }
    }
    Ok(())
}

/// Checks that a volume may have so many records, and that there is memory for its lists of them.
///
/// # Errors
/// [`Error::Value`] for more than are counted; [`Error::Os`] where the memory is not free.
pub fn check_records(num: usize) -> Result<()> {
    match u32::try_from(num) {
        Ok(num) => check_free(u64::from(num) * RECORD_BYTES),
        Err(_) => Err(Error::value(format!("`{num}` records, expected at most {}", u32::MAX))),
    }
}

/// The entries of a new volume of this shape.
fn check_shape(shape: &Shape, num_members: usize, options: &Options) -> Result<Box<[Entry]>> {
    if !shape.weights.is_empty() && shape.weights.len() != num_members {
        return Err(Error::value(format!(
            "`{}` weights are given for {num_members} members, expected one for each",
            shape.weights.len()
        )));
    }
    if !(1..=STRIPE_BYTES_MAX).contains(&shape.stripe_bytes) {
        return Err(Error::value(format!(
            "stripe_bytes is `{}`, expected 1 to {STRIPE_BYTES_MAX}",
            shape.stripe_bytes
        )));
    }
    if shape.durability == Durability::None && options.keep {
        return Err(Error::value(
            "keep is given with durability none, which leaves nothing to keep\nhint: durability \
             commit",
        ));
    }
    check_records(shape.record_nbytes.len())?;
    let sizes = shape.record_nbytes.iter().enumerate();
    sizes
        .map(|(record, &nbytes)| Ok(Entry::unwritten(format::record_nbytes(record, nbytes)?)))
        .collect()
}

/// The headers of the members, and where the records go.
fn design(
    name: &str,
    shape: &Shape,
    members: &[Member],
    entries: &[Entry],
) -> Result<(Vec<Header>, Geometry)> {
    let block_bytes = members.iter().map(Member::block_bytes).max().unwrap_or(1);
    let stripe_bytes = shape.stripe_bytes.next_multiple_of(block_bytes);
    let equal = vec![1; members.len()];
    let weights = if shape.weights.is_empty() { equal } else { shape.weights.clone() };
    let geometry = geometry_of(entries, &weights, stripe_bytes, block_bytes as u64)?;
    let volume = random()?;
    let headers = geometry.member_nbytes().iter().enumerate().map(|(member, &slot_bytes)| Header {
        volume,
        member: member as u32,
        slots: match shape.durability {
            Durability::Commit => 2,
            Durability::None => 1,
        },
        block_bytes: block_bytes as u64,
        stripe_bytes: stripe_bytes as u64,
        num_records: entries.len() as u64,
        slot_bytes,
        weights: weights.clone(),
        name: name.to_owned(),
    });
    Ok((headers.collect(), geometry))
}

fn geometry_of(
    entries: &[Entry],
    weights: &[u32],
    stripe_bytes: usize,
    block_bytes: u64,
) -> Result<Geometry> {
    let stored = entries.iter().map(|entry| Entry::stored_nbytes(entry.nbytes, block_bytes));
    let pieces: u64 = stored.clone().map(|nbytes| nbytes.div_ceil(stripe_bytes as u64)).sum();
    // Twice: the list grows by doubling.
    check_free(2 * pieces * size_of::<Piece>() as u64)?;
    Geometry::new(stored, weights, stripe_bytes)
}

fn named(name: &str, number: usize, member: &Member) -> String {
    format!("volume `{name}`: member `{number}` ({})", member.path.display())
}

/// Room for a header, aligned to a page.
fn header_space(pool: &Pool) -> Result<Buffer> {
    Buffer::new(HEADER_SPACE_BYTES, &BufferConfig::default(), pool)
}

fn write_headers(about: &About, members: &[Member], headers: &[Header], pool: &Pool) -> Result<()> {
    let mut space = header_space(pool)?;
    let space = bytes_of(&mut space);
    for (number, (member, header)) in members.iter().zip(headers).enumerate() {
        let bytes = header.encode();
        space[..bytes.len()].copy_from_slice(&bytes);
        (0..2)
            .try_for_each(|copy| write_all(&*member.disk, space, Extents::header_offset(copy)))
            .and_then(|()| member.disk.sync())
            .and_then(|()| member.sync_folder())
            .map_err(|error| {
                let named = named(&about.name, number, member);
                Error::os(format!("cannot write the header of {named}"), error)
            })?;
    }
    Ok(())
}

/// The headers of all members, which are those of one volume in its order.
fn read_headers(name: &str, members: &[Member], pool: &Pool) -> Result<Vec<Header>> {
    let mut space = header_space(pool)?;
    let mut headers: Vec<Header> = Vec::with_capacity(members.len());
    for (number, member) in members.iter().enumerate() {
        let header = read_header(name, number, member, bytes_of(&mut space))?;
        if member.is_of_another(&header, name) {
            return Err(Error::os(
                format!(
                    "{} has member `{}` of volume `{}`",
                    named(name, number, member),
                    header.member,
                    header.name
                ),
                Errno::BADMSG,
            ));
        }
        check_header(&header, number, headers.first().unwrap_or(&header), members.len()).map_err(
            |what| {
                let named = named(name, number, member);
                Error::os(format!("{named} {what}"), Errno::BADMSG)
            },
        )?;
        check_file(name, number, member, &header)?;
        headers.push(header);
    }
    // A record takes a block at least. The files have as much as headers say.
    let blocks = headers.iter().map(|header| header.slot_bytes / header.block_bytes);
    let Header { num_records, .. } = headers[0];
    if blocks.sum::<u64>() < num_records {
        return Err(Error::os(
            format!("volume `{name}` has no room for the `{num_records}` records of its headers"),
            Errno::BADMSG,
        ));
    }
    Ok(headers)
}

/// One of its two copies that is whole.
fn read_header(name: &str, number: usize, member: &Member, space: &mut [u8]) -> Result<Header> {
    let named = named(name, number, member);
    let read = |memory: &mut [u8], offset| read_all(&*member.disk, memory, offset);
    let copies = headers::copies(space, read);
    let is_degraded = match &copies {
        [Ok(Ok(header)), Ok(Ok(other))] if header != other => {
            return Err(Error::os(
                format!("{named} has two headers that differ, expected two copies of one"),
                Errno::BADMSG,
            ));
        }
        copies => copies.iter().any(|copy| !matches!(copy, Ok(Ok(_)))),
    };
    let why = match headers::best(copies) {
        Ok(Ok(header)) => {
            if is_degraded {
                log::warn!(
                    target: "stepwell",
                    "{named}: a copy of its header is damaged or cannot be read, the other is used"
                );
            }
            return Ok(header);
        }
        Err(error) => {
            return Err(Error::os(format!("cannot read the header of {named}"), error));
        }
        Ok(Err(why)) => why,
    };
    let what = match why {
        NoHeader::Foreign | NoHeader::Blank | NoHeader::Label => {
            "is no member of a volume, or of one that was never completely made".to_owned()
        }
        NoHeader::Damaged => "has a damaged header, in both copies".to_owned(),
        NoHeader::Version(version) => format!(
            "has the format `{version}`, expected {}; hint: open it with the release that made it",
            format::VERSION
        ),
    };
    Err(Error::os(format!("{named} {what}"), Errno::BADMSG))
}

/// What is wrong with the header of member `number`, beside that of the first one.
fn check_header(
    header: &Header,
    number: usize,
    first: &Header,
    num_members: usize,
) -> std::result::Result<(), String> {
    if header.volume != first.volume {
        return Err(format!(
            "belongs to another volume (`{:032x}`), expected that of member 0 (`{:032x}`)",
            header.volume, first.volume
        ));
    }
    if header.member as usize != number {
        return Err(format!(
            "is member `{}` of the volume; hint: name the drives in the order that it was made \
             with",
            header.member
        ));
    }
    if header.weights.len() != num_members {
        return Err(format!(
            "is of a volume of `{}` members, and {num_members} are given",
            header.weights.len()
        ));
    }
    let of_all = |header: &Header| Header { member: 0, slot_bytes: 0, ..header.clone() };
    if of_all(header) != of_all(first) {
        return Err("has a header that does not fit that of member `0`".to_owned());
    }
    Ok(())
}

/// Whether the file is what its header says.
fn check_file(name: &str, number: usize, member: &Member, header: &Header) -> Result<()> {
    let named = named(name, number, member);
    let nbytes =
        member.nbytes().map_err(|error| Error::os(format!("cannot look at {named}"), error))?;
    let expected = header.extents().file_bytes();
    if nbytes < expected {
        return Err(Error::os(
            format!("{named} is truncated: it has `{nbytes}` bytes, expected {expected}"),
            Errno::BADMSG,
        ));
    }
    if !header.block_bytes.is_multiple_of(member.block_bytes() as u64) {
        return Err(Error::os(
            format!(
                "{named} is on a file system whose blocks have `{}` bytes, expected a divisor of \
                 the volume's {}; hint: keep its files on drives like those that it was made on",
                member.block_bytes(),
                header.block_bytes
            ),
            Errno::INVAL,
        ));
    }
    Ok(())
}
