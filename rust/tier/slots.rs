//! Slots: the state of a chunk is somewhere, and an index says where, so that a step can be written
//! beside the state that it starts from and be taken back.
//!
//! All that a step writes of a chunk (weight, trailing bits, master, moments, scales, fingerprint)
//! is in one slot. A chunk's **home** is the tensors' own memory: it is there when nothing is out
//! of place, and no other chunk fits. A **spare** slot fits any chunk. A step out of place goes
//! from the slot that the state stands in to a target, home -> spare or spare -> home, so chunks
//! alternate between the two:
//!
//! ```text
//! take     a target for each chunk: a spare for one that stands at home, home for one that stands in a spare
//! commit   the targets are where the chunks stand; spares that they stood in are free
//! revert   the chunks stand where they stood; spares that were targets are free
//! settle   all chunks stand at home (who calls it has copied them there)
//! ```
//!
//! - SLOT-1 A chunk stands in one slot, and a spare belongs to one chunk at most: it stands in it,
//!   or it is its target.
//! - SLOT-2 A target is never the slot that its chunk stands in, so until the commit the old bits
//!   stand: whatever has happened to the target, revert loses nothing.
//! - SLOT-3 What cannot be taken whole is not taken at all. At most as many chunks as there are
//!   spares are away from home.
//! - SLOT-4 Who finds a chunk without a target steps it in place, wherever it stands.
//!
//! The index knows neither memory nor tensors, so it serves every tier. It is changed between the
//! steps of chunks, by one thread, and read during them by all. Cost: 56 B per chunk; each
//! operation is linear in the chunks that it is about.

use crate::error::{Error, Result};
use crate::state::chunk::Chunk;

/// Where the state of a chunk may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// In the tensors themselves.
    Home,
    /// In the spare slot of this number.
    Spare(usize),
}

/// The index: which slot holds the state of each chunk of a fixed list of tensors. See the
/// [module](self).
#[derive(Debug)]
pub struct Slots {
    chunks: Box<[Chunk]>,
    /// For each tensor the number of its first chunk, and one more for the end.
    first: Box<[usize]>,
    /// For each chunk where it stands.
    stands: Box<[Slot]>,
    /// For each chunk where it is written.
    target: Box<[Option<Slot>]>,
    /// The numbers of the chunks that have a target.
    taken: Vec<usize>,
    /// The spares that belong to no chunk.
    free: Vec<usize>,
    spares: usize,
}

impl Slots {
    /// The index of the chunks of tensors of these sizes, all at home, beside `spares` free slots.
    #[must_use]
    pub fn new(numels: &[usize], spares: usize) -> Self {
        let chunks: Box<[Chunk]> = Chunk::all(numels.iter().copied()).into();
        let begin = |tensor| chunks.partition_point(|chunk| chunk.tensor < tensor);
        Self {
            first: (0..=numels.len()).map(begin).collect(),
            stands: vec![Slot::Home; chunks.len()].into(),
            target: vec![None; chunks.len()].into(),
            taken: Vec::with_capacity(chunks.len()),
            // The lowest number is taken first.
            free: (0..spares).rev().collect(),
            spares,
            chunks,
        }
    }

    /// Where the chunk's state is.
    ///
    /// # Panics
    /// For a chunk that there is not.
    #[must_use]
    pub fn stands(&self, chunk: Chunk) -> Slot {
        self.stands[self.number(chunk)]
    }

    /// Where a step of the chunk is written: its target, or where it stands.
    ///
    /// # Panics
    /// As [`Slots::stands`].
    #[must_use]
    pub fn target(&self, chunk: Chunk) -> Slot {
        let number = self.number(chunk);
        self.target[number].unwrap_or(self.stands[number])
    }

    /// The chunks that do not stand at home.
    pub fn away(&self) -> impl Iterator<Item = Chunk> {
        self.chunks
            .iter()
            .zip(&self.stands)
            .filter(|(_, stands)| **stands != Slot::Home)
            .map(|(chunk, _)| *chunk)
    }

    /// Gives each of these chunks a target.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing taken, where there are fewer free spares than chunks that
    /// stand at home, or a chunk has a target already.
    ///
    /// # Panics
    /// As [`Slots::stands`].
    pub fn take(&mut self, chunks: impl Iterator<Item = Chunk>) -> Result<()> {
        let numbers: Vec<usize> = chunks.map(|chunk| self.number(chunk)).collect();
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        let is_repeated = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        if let Some(number) =
            is_repeated.or_else(|| sorted.into_iter().find(|&number| self.target[number].is_some()))
        {
            let Chunk { tensor, index } = self.chunks[number];
            return Err(Error::value(format!(
                "chunk `{index}` of tensor `{tensor}` is to be stepped twice, expected a commit or revert in between"
            )));
        }
        let at_home = numbers.iter().filter(|&&number| self.stands[number] == Slot::Home).count();
        if at_home > self.free.len() {
            return Err(Error::value(format!(
                "`{at_home}` chunks are to be written to spare slots, and `{}` of {} are free, expected one for each\nhint: settle what is away, or step fewer chunks out of place",
                self.free.len(),
                self.spares
            )));
        }
        for number in numbers {
            let target = match self.stands[number] {
                Slot::Home => self.free.pop().map(Slot::Spare),
                Slot::Spare(_) => Some(Slot::Home),
            };
            self.target[number] = target;
            self.taken.push(number);
        }
        Ok(())
    }

    /// The targets are where their chunks stand.
    pub fn commit(&mut self) {
        for number in self.taken.drain(..) {
            let stood = self.stands[number];
            self.stands[number] = self.target[number].take().unwrap_or(stood);
            self.free.extend(spare(stood));
        }
    }

    /// No chunk has a target.
    pub fn revert(&mut self) {
        for number in self.taken.drain(..) {
            self.free.extend(self.target[number].take().and_then(spare));
        }
    }

    /// All chunks stand at home, where their state has been copied; what had been taken is reverted
    /// first.
    pub fn settle(&mut self) {
        self.revert();
        for stands in &mut self.stands {
            self.free.extend(spare(std::mem::replace(stands, Slot::Home)));
        }
    }

    fn number(&self, Chunk { tensor, index }: Chunk) -> usize {
        let number = self.first[tensor] + index;
        assert!(
            number < self.first[tensor + 1],
            "chunk {index} of tensor {tensor} is not in the index"
        );
        number
    }
}

/// Which spare it is.
fn spare(slot: Slot) -> Option<usize> {
    match slot {
        Slot::Home => None,
        Slot::Spare(number) => Some(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{chunk::CHUNK_LEN, dither::mix64};

    const NUMELS: [usize; 4] = [2 * CHUNK_LEN + 1, 0, 7, CHUNK_LEN];
    const SPARES: usize = 3;

    /// SLOT-1 to SLOT-3, as far as they can be seen from outside.
    fn assert_sound(slots: &Slots) {
        let mut owners = [0; SPARES];
        for &chunk in &slots.chunks {
            let places = [Some(slots.stands(chunk)), slots.target[slots.number(chunk)]];
            assert_ne!(places[0], places[1]);
            places.into_iter().flatten().filter_map(spare).for_each(|number| owners[number] += 1);
        }
        slots.free.iter().for_each(|&number| owners[number] += 1);
        assert_eq!(owners, [1; SPARES], "a spare is free, stood in or a target: {slots:?}");
        assert!(slots.away().count() <= SPARES);
    }

    #[test]
    fn every_spare_has_one_owner_whatever_happens() {
        let mut slots = Slots::new(&NUMELS, SPARES);
        assert_eq!(slots.chunks.len(), 5);
        let (mut refused, mut taken) = (0, 0);
        for step in 0..2000 {
            let random = mix64(step) as usize;
            match random % 8 {
                0 | 1 => slots.commit(),
                2 => slots.revert(),
                3 if (random / 8).is_multiple_of(8) => slots.settle(),
                _ => {
                    let chosen: Vec<Chunk> = (0..5)
                        .filter(|bit| random >> (16 + bit) & 1 == 1)
                        .map(|number| slots.chunks[number])
                        .collect();
                    let before: Vec<(Slot, Slot)> = slots
                        .chunks
                        .iter()
                        .map(|&chunk| (slots.stands(chunk), slots.target(chunk)))
                        .collect();
                    match slots.take(chosen.into_iter()) {
                        Ok(()) => taken += 1,
                        Err(_) => {
                            refused += 1;
                            let after = slots
                                .chunks
                                .iter()
                                .map(|&chunk| (slots.stands(chunk), slots.target(chunk)));
                            assert!(after.eq(before), "refused, and changed");
                        }
                    }
                }
            }
            assert_sound(&slots);
        }
        assert!(refused > 100 && taken > 100, "{refused} refused, {taken} taken");
    }

    #[test]
    fn chunks_alternate_between_home_and_a_spare() {
        let mut slots = Slots::new(&NUMELS, SPARES);
        let [first, second] = [Chunk { tensor: 0, index: 2 }, Chunk { tensor: 3, index: 0 }];
        assert_eq!((slots.stands(first), slots.target(first)), (Slot::Home, Slot::Home));
        slots.take([first].into_iter()).expect("a spare");
        assert_eq!((slots.stands(first), slots.target(first)), (Slot::Home, Slot::Spare(0)));
        slots.commit();
        assert_eq!((slots.stands(first), slots.target(first)), (Slot::Spare(0), Slot::Spare(0)));
        slots.take([first, second].into_iter()).expect("home and a spare");
        assert_eq!((slots.target(first), slots.target(second)), (Slot::Home, Slot::Spare(1)));
        slots.revert();
        assert_eq!((slots.stands(first), slots.stands(second)), (Slot::Spare(0), Slot::Home));
        assert!(slots.away().eq([first]));
        slots.settle();
        assert_eq!((slots.stands(first), slots.away().count()), (Slot::Home, 0));
    }

    #[test]
    fn what_is_refused_is_named() {
        let mut slots = Slots::new(&NUMELS, SPARES);
        let chunk = Chunk { tensor: 0, index: 1 };
        let message = slots.take([chunk, chunk].into_iter()).expect_err("twice").to_string();
        assert!(message.contains("chunk `1` of tensor `0`"), "{message}");
        slots.take([chunk].into_iter()).expect("a spare");
        slots.take([chunk].into_iter()).expect_err("twice");
        let rest: Vec<Chunk> =
            slots.chunks.iter().copied().filter(|other| *other != chunk).collect();
        let message = slots.take(rest.into_iter()).expect_err("too many").to_string();
        assert!(message.contains("`4` chunks") && message.contains("`2` of 3"), "{message}");
    }
}
