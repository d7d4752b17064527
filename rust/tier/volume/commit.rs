//! How a step becomes the committed one, and how that is found again.
//!
//! The index of generation `g` is written twice, at place `g % 2`: copy 0 on the first member, copy
//! 1 on the last. The other place keeps generation `g - 1` meanwhile. A commit goes in this order,
//! each line after the one before has ended:
//!
//! ```text
//! 1  writes of all records, into slots that no committed entry names
//! 2  fdatasync of every member        the records are durable
//! 3  copy 0 of index g, fdatasync     THE COMMIT: from here on a reopened volume is at g
//! 4  copy 1 of index g, fdatasync     both copies are g
//! ```
//!
//! - CMT-1 A crash before line 3 has ended leaves copy 1 of the place at `g - 2`, and the other
//!   place at `g - 1`: the newest whole index is `g - 1`, whose records no one has written to. (Or
//!   copy 0 is whole by then: its records are durable since line 2, so `g` it is.)
//! - CMT-2 A crash later leaves copy 0 at `g`.
//! - CMT-3 No crash leaves both copies of one place damaged: one is only written once the other is
//!   durable. So where both are, something else has damaged them, and the volume is refused: the
//!   generation before is not taken for the newest. A copy that cannot be read is a damaged one.
//! - CMT-4 What is found is written again to both copies before the volume is used. So what was
//!   read is durable, and the next commit begins with both copies whole.
//! - CMT-5 Until the first write behind the commit of `g`, no one has written to the records of
//!   `g - 1` either. To go back to them is a commit: their entries, as generation `g + 1`, go to
//!   the place that has them already. A crash meanwhile leaves `g`, with `g - 1` whole in one copy,
//!   or `g + 1`. Who goes back has to know that no write was begun. Where one was, its record has
//!   another generation than its entry, and a read of it fails (VOL-2).
//!
//! Line 2 has little to do: members are flushed while the step writes, too (`flushes.rs`).
//!
//! Cost of a commit: two indices (64 B and 32 B per record, each rounded up to a block), and three
//! times the latency of a flush.

use std::io;

use super::{
    format::{
        Entry, Extents, Head, VolumeId, decode_entries, decode_head, decode_index, encode_index,
    },
    member::Member,
};
use crate::{
    Error, Result,
    tier::io::disk::{read_all, write_all},
};

/// A volume's index while the volume is made or opened: room for one copy, page-aligned, and where
/// the copies are.
pub(super) struct Image<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) volume_name: &'a str,
    pub(super) members: &'a [Member],
    /// Of each member.
    pub(super) extents: &'a [Extents],
}

/// Where the copies of the index of a generation are, in the order that they are written in: the
/// number of a member, and the offset there.
pub(super) fn places(extents: &[Extents], generation: u64) -> [(usize, u64); 2] {
    [0, 1].map(|copy| {
        let member = copy * (extents.len() - 1);
        (member, extents[member].index_offset(generation, copy))
    })
}

impl Image<'_> {
    fn error(
        &self,
        what: &str,
        generation: u64,
        step: Option<u64>,
        copy: usize,
        error: io::Error,
    ) -> Error {
        let (number, offset) = places(self.extents, generation)[copy];
        let step = step.map_or("none".to_owned(), |step| step.to_string());
        Error::os(
            format!(
                "cannot {what} the index of volume `{}`: member `{number}` ({}), offset \
                 `{offset}`, step `{step}`",
                self.volume_name,
                self.members[number].path.display(),
            ),
            error,
        )
    }

    /// Lines 3 and 4, before there is an engine. [`super::Volume::commit`] has them with one.
    pub(super) fn write(
        &mut self,
        head: Head,
        entries: impl ExactSizeIterator<Item = Entry>,
    ) -> Result<()> {
        encode_index(&head, entries, self.bytes);
        for (copy, (number, offset)) in
            places(self.extents, head.generation).into_iter().enumerate()
        {
            let disk = &self.members[number].disk;
            write_all(&**disk, self.bytes, offset)
                .and_then(|()| disk.sync())
                .map_err(|error| self.error("write", head.generation, head.step, copy, error))?;
        }
        Ok(())
    }

    /// The newest committed index, which is then whole and durable: of `step`, where one is given.
    /// Between them the step of the one before, which can still be gone back to.
    pub(super) fn find(
        &mut self,
        volume: VolumeId,
        num_records: usize,
        step: Option<u64>,
    ) -> Result<(Head, Option<u64>, Box<[Entry]>)> {
        let decode = |bytes: &[u8]| decode_index(bytes, volume, num_records);
        let whole = self.copies(decode)?;
        let newest = whole.iter().map(|(head, _)| head.generation).max().unwrap_or_default();
        let of = |generation| whole.iter().find(|(head, _)| head.generation == generation);
        let is_wanted = |(head, _): &&(Head, usize)| step.is_none() || head.step == step;
        let before = newest.checked_sub(1).and_then(of);
        let Some(&(found, copy)) =
            of(newest).filter(is_wanted).or_else(|| before.filter(is_wanted))
        else {
            return Err(self.not_at(step, [of(newest), before]));
        };
        let again = self.read(found.generation, copy).and_then(|()| match decode(self.bytes) {
            Some(head) if head == found => Ok(()),
            _ => Err(damaged_index()),
        });
        again.map_err(|error| self.error("read", found.generation, found.step, copy, error))?;
        let entries: Box<[Entry]> = decode_entries(self.bytes, num_records).collect();
        let is_newest = found.generation == newest;
        let head = if is_newest { found } else { Head { generation: newest + 1, ..found } };
        for member in self.members {
            let failed = |error| self.error("sync", head.generation, head.step, 0, error);
            member.disk.sync().map_err(failed)?;
        }
        // To go back is a commit: the one that was left then is of the generation before, and is
        // none to go back to, though its step is a later one.
        let step_before = before
            .filter(|_| is_newest)
            .and_then(|(head, _)| head.step)
            .filter(|&step| Some(step) < head.step);
        self.write(head, entries.iter().copied())?;
        Ok((head, step_before, entries))
    }

    fn not_at(&self, step: Option<u64>, found: [Option<&(Head, usize)>; 2]) -> Error {
        let [wanted, last, before] =
            [step, found[0].and_then(|one| one.0.step), found[1].and_then(|one| one.0.step)]
                .map(|step| step.map_or("none".to_owned(), |step| step.to_string()));
        Error::value(format!(
            "volume `{}` is to be opened at step `{wanted}`, expected its last one, `{last}`, or \
             the one before, `{before}`",
            self.volume_name
        ))
    }

    /// Checks that each place has a head of an index of so many entries: with room for a block
    /// alone, before there is memory for as many as a header says.
    pub(super) fn check_heads(&mut self, volume: VolumeId, num_records: usize) -> Result<()> {
        let is_ours =
            |&(head, num, _): &(Head, usize, u64)| head.volume == volume && num == num_records;
        let block_bytes = self.bytes.len().min(self.extents[0].index_bytes as usize);
        let Self { bytes, volume_name, members, extents } = self;
        Image { bytes: &mut bytes[..block_bytes], volume_name, members, extents }
            .copies(|bytes| decode_head(bytes).filter(is_ours).map(|(head, ..)| head))
            .map(drop)
    }

    /// Of both places the copies that `decode` finds the head of, and which of the two each is. One
    /// that cannot be read is as one that is damaged.
    fn copies(&mut self, decode: impl Fn(&[u8]) -> Option<Head>) -> Result<Vec<(Head, usize)>> {
        let mut whole = Vec::with_capacity(4);
        for place in 0..2 {
            let num = whole.len();
            let mut failure = ("use", 0, damaged_index());
            for copy in 0..2 {
                match self.read(place, copy) {
                    Ok(()) => {
                        let head = decode(self.bytes).filter(|head| head.generation % 2 == place);
                        whole.extend(head.map(|head| (head, copy)));
                    }
                    Err(error) => failure = ("read", copy, error),
                }
            }
            if whole.len() == num {
                let (what, copy, error) = failure;
                return Err(self.error(what, place, None, copy, error));
            }
        }
        Ok(whole)
    }

    fn read(&mut self, generation: u64, copy: usize) -> io::Result<()> {
        let (number, offset) = places(self.extents, generation)[copy];
        read_all(&*self.members[number].disk, self.bytes, offset)
    }
}

fn damaged_index() -> io::Error {
    // What ext4 and xfs say of metadata with a wrong checksum.
    rustix::io::Errno::BADMSG.into()
}
