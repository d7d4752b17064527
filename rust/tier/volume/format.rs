//! What is written on the members: header, index, trailers. Encoding and decoding of bytes alone;
//! integers are little-endian.
//!
//! ```text
//! member         | header | header | index | index | index | index | records of slot 0 | slot 1 |
//!                  copy 0   copy 1   place 0         place 1
//!                                    copy 0  copy 1  copy 0  copy 1
//! record         | state of a chunk, opaque | zeros | trailer (64 B) |   whole blocks
//! index          | head (64 B) | entry (32 B) of each record |
//! ```
//!
//! A member is a file, or a block device from its first byte on. A device without a volume has a
//! label in the place of each copy of the header.
//!
//! Every member has room for all of this. The header is written on each member, when the volume is
//! made, and never again. Copy 0 of the index is used on the first member, copy 1 on the last
//! ([`super::commit`] says when which is written).
//!
//! An entry says what its record has to be: its checksum, the generation and step that wrote it,
//! and its slot. The trailer says what the bytes at a place are. So a read that finds other bytes
//! than the entry's can say what they are: changed, stale, of another record or volume.
//!
//! - FMT-1 Nothing is decoded from bytes whose checksum does not match.
//! - FMT-2 A record's checksum is over its opaque bytes; that of header, index head, index entries
//!   and trailer over all of their other bytes.

use std::ops::Range;

use super::geometry::{MEMBERS_MAX, STRIPE_BYTES_MAX};
use crate::{Error, Result, tier::io::disk::BLOCK_BYTES};

/// The version of all of this.
pub(super) const VERSION: u32 = 2;

/// The most bytes of a volume's name: a file's name has a member's number and an ending beside it.
pub(super) const NAME_BYTES_MAX: usize = 200;

/// Room for one copy of the header: the largest block of a file system.
pub(super) const HEADER_SPACE_BYTES: usize = 64 << 10;

/// The smallest block: pages of a drive, and of memory.
pub(super) const BLOCK_BYTES_MIN: usize = BLOCK_BYTES;

/// Bytes of a trailer.
pub(super) const TRAILER_BYTES: usize = 64;

const HEAD_BYTES: usize = 64;
const ENTRY_BYTES: usize = 32;
const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"stepwell");
const LABEL_MAGIC: u64 = u64::from_le_bytes(*b"swdevice");
const INDEX_MAGIC: u64 = u64::from_le_bytes(*b"swindex\0");
const TRAILER_MAGIC: u32 = u32::from_le_bytes(*b"swrc");

/// What a file, an index or a record belongs to.
pub(super) type VolumeId = u128;

/// The checksum of all that is written.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// Integers one after the other.
struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put<const N: usize>(&mut self, value: [u8; N]) {
        self.bytes[self.at..self.at + N].copy_from_slice(&value);
        self.at += N;
    }

    fn u32(&mut self, value: u32) {
        self.put(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(value.to_le_bytes());
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        value.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        value
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// Writes the checksum of all but the last 8 bytes there.
fn seal(bytes: &mut [u8]) {
    let end = bytes.len() - 8;
    let sum = checksum(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
}

fn is_sealed(bytes: &[u8]) -> bool {
    let (body, sum) = bytes.split_at(bytes.len() - 8);
    sum == checksum(body).to_le_bytes()
}

/// What a volume is, and which of its members a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) volume: VolumeId,
    pub(super) member: u32,
    /// How many slots each record has: two, or one where steps are written in place.
    pub(super) slots: u32,
    pub(super) block_bytes: u64,
    pub(super) stripe_bytes: u64,
    pub(super) num_records: u64,
    /// What the records take on this member, of one slot.
    pub(super) slot_bytes: u64,
    /// One for each member.
    pub(super) weights: Vec<u32>,
    /// Of the volume when it was made. A device has no other name of it; a file may be renamed.
    pub(super) name: String,
}

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoHeader {
    /// Nothing but zeros: nothing was written yet.
    Blank,
    /// The label of a device without a volume.
    Label,
    /// Of something else.
    Foreign,
    /// Of a version that this program does not know.
    Version(u32),
    /// It was one, and its bits have changed.
    Damaged,
}

impl Header {
    /// Bytes of it.
    pub(super) const BYTES: usize = 4096;

    /// As it is written.
    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let mut to = Writer { bytes: &mut bytes, at: 0 };
        to.u64(HEADER_MAGIC);
        to.u32(VERSION);
        to.u32(self.member);
        to.put(self.volume.to_le_bytes());
        to.u64(self.block_bytes);
        to.u64(self.stripe_bytes);
        to.u64(self.num_records);
        to.u64(self.slot_bytes);
        to.u32(self.slots);
        to.u32(self.weights.len() as u32);
        self.weights.iter().for_each(|&weight| to.u32(weight));
        to.u32(self.name.len() as u32);
        self.name.bytes().for_each(|byte| to.put([byte]));
        seal(&mut bytes);
        bytes
    }

    /// From a copy of it.
    pub(super) fn decode(bytes: &[u8]) -> std::result::Result<Self, NoHeader> {
        let bytes = &bytes[..Self::BYTES];
        let mut from = Reader { bytes, at: 0 };
        match from.u64() {
            HEADER_MAGIC => {}
            LABEL_MAGIC if is_sealed(bytes) => return Err(NoHeader::Label),
            _ if bytes.iter().all(|&byte| byte == 0) => return Err(NoHeader::Blank),
            _ => return Err(NoHeader::Foreign),
        }
        if !is_sealed(bytes) {
            return Err(NoHeader::Damaged);
        }
        let version = from.u32();
        if version != VERSION {
            return Err(NoHeader::Version(version));
        }
        let member = from.u32();
        let volume = VolumeId::from_le_bytes(from.take());
        let [block_bytes, stripe_bytes, num_records, slot_bytes] =
            std::array::from_fn(|_| from.u64());
        let [slots, num_members] = std::array::from_fn(|_| from.u32());
        // What was never written: a checksum is no proof against who computes it.
        let is_sound = slots == 2
            && (1..=MEMBERS_MAX).contains(&(num_members as usize))
            && block_bytes.is_power_of_two()
            && (BLOCK_BYTES_MIN..=HEADER_SPACE_BYTES).contains(&(block_bytes as usize))
            && stripe_bytes.is_multiple_of(block_bytes)
            && (1..=STRIPE_BYTES_MAX.next_multiple_of(HEADER_SPACE_BYTES) as u64)
                .contains(&stripe_bytes)
            && u32::try_from(num_records).is_ok()
            && slot_bytes < 1 << 60;
        if !is_sound {
            return Err(NoHeader::Damaged);
        }
        let weights = (0..num_members).map(|_| from.u32()).collect();
        let name_bytes = from.u32() as usize;
        if name_bytes > NAME_BYTES_MAX {
            return Err(NoHeader::Damaged);
        }
        let name = (0..name_bytes).map(|_| from.take::<1>()[0]).collect();
        let name = String::from_utf8(name).map_err(|_| NoHeader::Damaged)?;
        Ok(Self {
            volume,
            member,
            slots,
            block_bytes,
            stripe_bytes,
            num_records,
            slot_bytes,
            weights,
            name,
        })
    }

    /// Where things are in the member's file.
    pub(super) fn extents(&self) -> Extents {
        Extents {
            index_bytes: index_bytes(self.num_records as usize, self.block_bytes),
            slot_bytes: self.slot_bytes,
            slots: self.slots,
        }
    }
}

/// Writes the label of a device without a volume to the beginning of `bytes`.
pub(super) fn encode_label(bytes: &mut [u8]) {
    let bytes = &mut bytes[..Header::BYTES];
    bytes.fill(0);
    let mut to = Writer { bytes, at: 0 };
    to.u64(LABEL_MAGIC);
    to.u32(VERSION);
    seal(bytes);
}

/// Bytes of one copy of the index, to a multiple of the block.
pub(super) fn index_bytes(num_records: usize, block_bytes: u64) -> u64 {
    ((HEAD_BYTES + num_records * ENTRY_BYTES) as u64).next_multiple_of(block_bytes)
}

/// Where things are in a member's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extents {
    pub(super) index_bytes: u64,
    pub(super) slot_bytes: u64,
    pub(super) slots: u32,
}

impl Extents {
    /// Of any volume: the first place of an index, copy 0.
    pub(super) const FIRST_INDEX_OFFSET: u64 = 2 * HEADER_SPACE_BYTES as u64;

    pub(super) fn header_offset(copy: usize) -> u64 {
        (copy * HEADER_SPACE_BYTES) as u64
    }

    /// Of generation `generation`: the places take turns.
    pub(super) fn index_offset(&self, generation: u64, copy: usize) -> u64 {
        Self::FIRST_INDEX_OFFSET + (2 * (generation % 2) + copy as u64) * self.index_bytes
    }

    /// Where the records of a slot begin.
    pub(super) fn slot_offset(&self, slot: u32) -> u64 {
        Self::FIRST_INDEX_OFFSET + 4 * self.index_bytes + u64::from(slot) * self.slot_bytes
    }

    /// Bytes of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.slot_offset(self.slots)
    }
}

/// What a record has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Of its opaque bytes.
    pub(super) checksum: u64,
    /// The generation that it was written for.
    pub(super) generation: u64,
    /// The step that wrote it.
    pub(super) step: u64,
    /// Its opaque bytes.
    pub(super) nbytes: u32,
    /// Where it is; [`Entry::NOWHERE`] before its first write.
    pub(super) slot: u32,
}

impl Entry {
    /// The slot of a record that was never written.
    pub(super) const NOWHERE: u32 = u32::MAX;

    /// Of a record that was never written.
    pub(super) fn unwritten(nbytes: u32) -> Self {
        Self { checksum: 0, generation: 0, step: 0, nbytes, slot: Self::NOWHERE }
    }

    /// Bytes that it takes on the members.
    pub(super) fn stored_nbytes(nbytes: u32, block_bytes: u64) -> u64 {
        (u64::from(nbytes) + TRAILER_BYTES as u64).next_multiple_of(block_bytes)
    }

    /// Where its trailer is in these bytes.
    pub(super) fn trailer_range(stored_nbytes: usize) -> Range<usize> {
        stored_nbytes - TRAILER_BYTES..stored_nbytes
    }
}

/// What an index is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) volume: VolumeId,
    /// Counts commits.
    pub(super) generation: u64,
    /// The committed step; none before the first commit.
    pub(super) step: Option<u64>,
}

/// Writes the index of these entries.
pub(super) fn encode_index(
    head: &Head,
    entries: impl ExactSizeIterator<Item = Entry>,
    bytes: &mut [u8],
) {
    let num_records = entries.len();
    let end = HEAD_BYTES + num_records * ENTRY_BYTES;
    bytes[end..].fill(0);
    for (entry, bytes) in entries.zip(bytes[HEAD_BYTES..end].chunks_exact_mut(ENTRY_BYTES)) {
        let mut to = Writer { bytes, at: 0 };
        to.u64(entry.checksum);
        to.u64(entry.generation);
        to.u64(entry.step);
        to.u32(entry.nbytes);
        to.u32(entry.slot);
    }
    let sum = checksum(&bytes[HEAD_BYTES..end]);
    let mut to = Writer { bytes: &mut bytes[..HEAD_BYTES], at: 0 };
    to.u64(INDEX_MAGIC);
    to.put(head.volume.to_le_bytes());
    to.u64(head.generation);
    to.u32(u32::from(head.step.is_some()));
    to.u32(num_records as u32);
    to.u64(head.step.unwrap_or(0));
    to.u64(sum);
    seal(&mut bytes[..HEAD_BYTES]);
}

/// The head of an index that the bytes begin with, if it is whole; how many entries follow, and
/// their checksum.
pub(super) fn decode_head(bytes: &[u8]) -> Option<(Head, usize, u64)> {
    let bytes = &bytes[..HEAD_BYTES];
    let mut from = Reader { bytes, at: 0 };
    if from.u64() != INDEX_MAGIC || !is_sealed(bytes) {
        return None;
    }
    let volume = VolumeId::from_le_bytes(from.take());
    let generation = from.u64();
    let [has_step, num_records] = std::array::from_fn(|_| from.u32());
    let [step, sum] = std::array::from_fn(|_| from.u64());
    let head = Head { volume, generation, step: (has_step != 0).then_some(step) };
    Some((head, num_records as usize, sum))
}

/// The head of an index of this volume, if the bytes are one and whole.
pub(super) fn decode_index(bytes: &[u8], volume: VolumeId, num_records: usize) -> Option<Head> {
    let (head, of_records, sum) = decode_head(bytes)?;
    let entries = &bytes[HEAD_BYTES..HEAD_BYTES + num_records * ENTRY_BYTES];
    (head.volume == volume && of_records == num_records && sum == checksum(entries)).then_some(head)
}

/// The entries of an index whose head was decoded.
pub(super) fn decode_entries(bytes: &[u8], num_records: usize) -> impl Iterator<Item = Entry> {
    bytes[HEAD_BYTES..].chunks_exact(ENTRY_BYTES).take(num_records).map(|bytes| {
        let mut from = Reader { bytes, at: 0 };
        let [checksum, generation, step] = std::array::from_fn(|_| from.u64());
        let [nbytes, slot] = std::array::from_fn(|_| from.u32());
        Entry { checksum, generation, step, nbytes, slot }
    })
}

/// Writes the trailer of a record, and zeros before it.
pub(super) fn encode_trailer(stored: &mut [u8], volume: VolumeId, record: usize, entry: &Entry) {
    let range = Entry::trailer_range(stored.len());
    stored[entry.nbytes as usize..range.start].fill(0);
    let trailer = &mut stored[range];
    let mut to = Writer { bytes: trailer, at: 0 };
    to.u32(TRAILER_MAGIC);
    to.u32(entry.nbytes);
    to.put(volume.to_le_bytes());
    to.u64(record as u64);
    to.u64(entry.generation);
    to.u64(entry.step);
    to.u64(entry.checksum);
    seal(trailer);
}

/// Whether the bytes are the record that the entry says; else what they are.
pub(super) fn verify(
    stored: &[u8],
    volume: VolumeId,
    record: usize,
    entry: &Entry,
) -> std::result::Result<(), String> {
    let trailer = &stored[Entry::trailer_range(stored.len())];
    let mut from = Reader { bytes: trailer, at: 0 };
    if from.u32() != TRAILER_MAGIC || !is_sealed(trailer) {
        let is_zero = stored.iter().all(|&byte| byte == 0);
        let what = if is_zero { "nothing but zeros is there" } else { "its trailer is damaged" };
        return Err(what.to_owned());
    }
    let nbytes = from.u32();
    let of_volume = VolumeId::from_le_bytes(from.take());
    let [of_record, generation, step, sum] = std::array::from_fn(|_| from.u64());
    if of_volume != volume {
        return Err(format!("a record of another volume (`{of_volume:032x}`) is there"));
    }
    if of_record != record as u64 || nbytes != entry.nbytes {
        return Err(format!("record `{of_record}` of `{nbytes}` bytes is there"));
    }
    if generation != entry.generation || step != entry.step {
        return Err(format!(
            "a stale record is there, of step `{step}` (generation {generation}, expected {})",
            entry.generation
        ));
    }
    let found = checksum(&stored[..entry.nbytes as usize]);
    if sum != entry.checksum || found != entry.checksum {
        return Err(format!(
            "its checksum is `{found:016x}`, expected {:016x}: its bits have changed, or only a \
             part of it was written",
            entry.checksum
        ));
    }
    Ok(())
}

/// The size of a record as it is held.
///
/// # Errors
/// [`Error::Value`] for a record of no bytes, or of more than 2 GiB.
pub(super) fn record_nbytes(record: usize, nbytes: usize) -> Result<u32> {
    match u32::try_from(nbytes) {
        Ok(nbytes) if nbytes > 0 && nbytes <= 2 << 30 => Ok(nbytes),
        _ => Err(Error::value(format!(
            "record `{record}` has `{nbytes}` bytes, expected 1 to {}",
            2_u64 << 30
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOLUME: VolumeId = 0x0123_4567_89ab_cdef_0f1e_2d3c_4b5a_6978;

    fn header() -> Header {
        Header {
            volume: VOLUME,
            member: 2,
            slots: 2,
            block_bytes: 4096,
            stripe_bytes: 1 << 20,
            num_records: 300,
            slot_bytes: 77 * 4096,
            weights: vec![400, 400, 200],
            name: "run-7".to_owned(),
        }
    }

    fn entries(num: usize) -> Vec<Entry> {
        (0..num as u64)
            .map(|i| Entry {
                checksum: i.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                generation: i + 3,
                step: i + 1000,
                nbytes: 10 + i as u32,
                slot: i as u32 % 2,
            })
            .collect()
    }

    #[test]
    fn a_header_is_read_as_it_was_written_and_any_flipped_bit_is_seen() {
        let bytes = header().encode();
        assert_eq!(Header::decode(&bytes), Ok(header()));
        let largest = Header { weights: vec![7; 64], ..header() };
        assert_eq!(Header::decode(&largest.encode()), Ok(largest));
        for bit in 0..8 * bytes.len() {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 64 { NoHeader::Foreign } else { NoHeader::Damaged };
            assert_eq!(Header::decode(&bytes), Err(expected), "bit {bit}");
        }
        assert_eq!(Header::decode(&[0; Header::BYTES]), Err(NoHeader::Blank));
    }

    #[test]
    fn what_no_volume_has_is_damaged_whatever_its_checksum() {
        let sound = header();
        for header in [
            Header { slots: 1, ..sound.clone() },
            Header { block_bytes: 0, ..sound.clone() },
            Header { block_bytes: 6000, ..sound.clone() },
            Header { block_bytes: 1 << 40, ..sound.clone() },
            Header { stripe_bytes: 0, ..sound.clone() },
            Header { stripe_bytes: 5000, ..sound.clone() },
            Header { stripe_bytes: 1 << 50, ..sound.clone() },
            Header { num_records: 1 << 40, ..sound.clone() },
            Header { slot_bytes: u64::MAX, ..sound.clone() },
            Header { weights: vec![], ..sound.clone() },
            Header { weights: vec![1; 65], ..sound },
        ] {
            assert_eq!(Header::decode(&header.encode()), Err(NoHeader::Damaged), "{header:?}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = header().encode();
        bytes[8..12].copy_from_slice(&9_u32.to_le_bytes());
        seal(&mut bytes);
        assert_eq!(Header::decode(&bytes), Err(NoHeader::Version(9)));
    }

    #[test]
    fn extents_lie_apart() {
        let extents = header().extents();
        let index = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(generation, copy)| {
            let offset = extents.index_offset(generation, copy);
            assert_eq!(offset, extents.index_offset(generation + 2, copy));
            offset
        });
        let mut places = vec![(Extents::header_offset(0), HEADER_SPACE_BYTES as u64)];
        places.push((Extents::header_offset(1), HEADER_SPACE_BYTES as u64));
        places.extend(index.map(|offset| (offset, extents.index_bytes)));
        places.extend([0, 1].map(|slot| (extents.slot_offset(slot), extents.slot_bytes)));
        let mut end = 0;
        for (offset, nbytes) in places {
            assert!(offset == end && offset.is_multiple_of(4096));
            end = offset + nbytes;
        }
        assert_eq!(end, extents.file_bytes());
    }

    #[test]
    fn an_index_is_read_as_it_was_written_and_any_flipped_bit_is_seen() {
        for (num, step) in [(0, None), (1, Some(0)), (300, Some(17))] {
            let head = Head { volume: VOLUME, generation: 5, step };
            let mut bytes = vec![0xaa; index_bytes(num, 4096) as usize];
            encode_index(&head, entries(num).into_iter(), &mut bytes);
            assert_eq!(decode_index(&bytes, VOLUME, num), Some(head));
            assert!(decode_entries(&bytes, num).eq(entries(num)));
            assert_eq!(decode_index(&bytes, VOLUME + 1, num), None);
            assert_eq!(decode_index(&bytes, VOLUME, num + 1), None);
            for bit in (0..8 * (HEAD_BYTES + num * ENTRY_BYTES)).step_by(7) {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode_index(&bytes, VOLUME, num), None, "bit {bit}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    proptest! {
        #[test]
        fn a_record_is_what_its_entry_says_or_an_error(
            nbytes in 1_u32..9000,
            byte in any::<u8>(),
            bit in any::<prop::sample::Index>(),
        ) {
            let stored_nbytes = Entry::stored_nbytes(nbytes, 4096) as usize;
            prop_assert!(stored_nbytes >= nbytes as usize + TRAILER_BYTES);
            prop_assert!(stored_nbytes < nbytes as usize + TRAILER_BYTES + 4096);
            let mut stored = vec![byte; stored_nbytes];
            let sum = checksum(&stored[..nbytes as usize]);
            let entry = Entry { checksum: sum, generation: 7, step: 40, nbytes, slot: 1 };
            encode_trailer(&mut stored, VOLUME, 9, &entry);
            prop_assert_eq!(verify(&stored, VOLUME, 9, &entry), Ok(()));

            let stale = Entry { generation: 6, step: 39, ..entry };
            let found = verify(&stored, VOLUME, 9, &stale).expect_err("another step");
            prop_assert!(found.contains("stale record is there, of step `40`"));
            let found = verify(&stored, VOLUME, 8, &entry).expect_err("another record");
            prop_assert!(found.contains("record `9`"));
            let found = verify(&stored, VOLUME + 1, 9, &entry).expect_err("another volume");
            prop_assert!(found.contains("another volume"));

            // Padding is not the record's.
            let trailer = 8 * Entry::trailer_range(stored_nbytes).start;
            let bits: Vec<usize> =
                (0..8 * nbytes as usize).chain(trailer..8 * stored_nbytes).collect();
            let bit = *bit.get(&bits);
            stored[bit / 8] ^= 1 << (bit % 8);
            verify(&stored, VOLUME, 9, &entry).expect_err("a flipped bit");
            stored.fill(0);
            let found = verify(&stored, VOLUME, 9, &entry).expect_err("never written");
            prop_assert!(found.contains("zeros"));
        }
    }

    #[test]
    fn a_record_of_no_bytes_or_too_many_is_refused() {
        assert!(record_nbytes(3, 1).is_ok() && record_nbytes(3, 2 << 30).is_ok());
        for nbytes in [0, (2 << 30) + 1, usize::MAX] {
            let error = record_nbytes(3, nbytes).expect_err("refused").to_string();
            assert!(error.contains(&format!("record `3` has `{nbytes}` bytes")), "{error}");
        }
    }
}
