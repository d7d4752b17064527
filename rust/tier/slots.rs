//! Slots: where the state of each chunk is, for steps that are written beside the state that they
//! start from and can be taken back.
//!
//! A slot holds all that a step writes of a chunk: weight, trailing bits, master, moments, scales,
//! fingerprint ([`crate::state::layout`]). A chunk's **home** is the tensors' own memory; it fits
//! no other chunk. A **spare** slot fits any chunk. A step out of place goes from the slot that
//! holds the chunk's state to its target: from home to a spare, or from a spare to home. So chunks
//! alternate between the two.
//!
//! ```text
//! assign_targets   a target for each chunk: a spare if its state is at home, else home
//! commit           the targets hold the states; spares that held them are free
//! revert           no chunk has a target; spares that were targets are free
//! set_all_home     all states are at home (the caller has copied them there)
//! ```
//!
//! - SLOT-1 One slot holds the state of a chunk. A spare belongs to one chunk at most: it holds its
//!   state, or is its target.
//! - SLOT-2 A target is never the slot that holds the chunk's state. So until the commit the old
//!   bits are there: whatever has happened to the target, revert loses nothing.
//! - SLOT-3 Targets are assigned to all chunks of a call, or to none. At most as many states as
//!   there are spares are not at home.
//! - SLOT-4 A chunk without a target is stepped in place, in the slot that holds it.
//!
//! The index knows neither memory nor tensors, so it serves every tier. One thread changes it,
//! between the steps of chunks; all threads read it during them. Cost: 56 B per chunk; each
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
    /// For each chunk the slot that holds its state.
    current: Box<[Slot]>,
    /// For each chunk the slot that the next step of it is written to.
    target: Box<[Option<Slot>]>,
    /// The numbers of the chunks that have a target.
    assigned: Vec<usize>,
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
            current: vec![Slot::Home; chunks.len()].into(),
            target: vec![None; chunks.len()].into(),
            assigned: Vec::with_capacity(chunks.len()),
            // The lowest number is taken first.
            free: (0..spares).rev().collect(),
            spares,
            chunks,
        }
    }

    /// The slot that holds the chunk's state.
    ///
    /// # Panics
    /// For a chunk that there is not.
    #[must_use]
    pub fn current(&self, chunk: Chunk) -> Slot {
        self.current[self.number(chunk)]
    }

    /// Where a step of the chunk is written: its target, or the slot that holds its state.
    ///
    /// # Panics
    /// As [`Slots::current`].
    #[must_use]
    pub fn target(&self, chunk: Chunk) -> Slot {
        let number = self.number(chunk);
        self.target[number].unwrap_or(self.current[number])
    }

    /// The chunks whose state is in a spare.
    pub fn in_spares(&self) -> impl Iterator<Item = Chunk> {
        self.chunks
            .iter()
            .zip(&self.current)
            .filter(|(_, current)| **current != Slot::Home)
            .map(|(chunk, _)| *chunk)
    }

    /// Gives each of these chunks a target.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing assigned, where there are fewer free spares than chunks whose
    /// state is at home, or a chunk has a target already.
    ///
    /// # Panics
    /// As [`Slots::current`].
    pub fn assign_targets(&mut self, chunks: impl Iterator<Item = Chunk> + Clone) -> Result<()> {
        let has_target = |&chunk: &Chunk| self.target[self.number(chunk)].is_some();
        if let Some(chunk) = chunks.clone().find(has_target) {
            return Err(stepped_twice(chunk));
        }
        let at_home = chunks.clone().filter(|&chunk| self.current(chunk) == Slot::Home).count();
        if at_home > self.free.len() {
            return Err(Error::value(format!(
                "`{at_home}` chunks are to be written to spare slots, and `{}` of {} are free, \
                 expected one for each\nhint: copy home what is in spares, or step fewer \
                 chunks out of place",
                self.free.len(),
                self.spares
            )));
        }
        let before = self.assigned.len();
        for chunk in chunks {
            let number = self.number(chunk);
            // A chunk that is named twice has got a target here.
            if self.target[number].is_some() {
                self.revert_to(before);
                return Err(stepped_twice(chunk));
            }
            self.target[number] = match self.current[number] {
                Slot::Home => self.free.pop().map(Slot::Spare),
                Slot::Spare(_) => Some(Slot::Home),
            };
            self.assigned.push(number);
        }
        Ok(())
    }

    /// Only the first `assigned` of the chunks that have a target keep it. The others' spares are
    /// free in the order that they were in before.
    fn revert_to(&mut self, assigned: usize) {
        for number in self.assigned.drain(assigned..).rev() {
            self.free.extend(self.target[number].take().and_then(spare));
        }
    }

    /// The targets hold the states of their chunks.
    pub fn commit(&mut self) {
        for number in self.assigned.drain(..) {
            let before = self.current[number];
            self.current[number] = self.target[number].take().unwrap_or(before);
            self.free.extend(spare(before));
        }
    }

    /// No chunk has a target.
    pub fn revert(&mut self) {
        self.revert_to(0);
    }

    /// All states are at home, where the caller has copied them. What was assigned is reverted
    /// first.
    pub fn set_all_home(&mut self) {
        self.revert();
        for current in &mut self.current {
            self.free.extend(spare(std::mem::replace(current, Slot::Home)));
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

fn stepped_twice(Chunk { tensor, index }: Chunk) -> Error {
    Error::value(format!(
        "chunk `{index}` of tensor `{tensor}` is to be stepped twice, expected a commit or revert \
         in between"
    ))
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
            let places = [Some(slots.current(chunk)), slots.target[slots.number(chunk)]];
            assert_ne!(places[0], places[1]);
            places.into_iter().flatten().filter_map(spare).for_each(|number| owners[number] += 1);
        }
        slots.free.iter().for_each(|&number| owners[number] += 1);
        assert_eq!(owners, [1; SPARES], "a spare is free, holds a state or is a target: {slots:?}");
        assert!(slots.in_spares().count() <= SPARES);
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
                3 if (random / 8).is_multiple_of(8) => slots.set_all_home(),
                _ => {
                    let chosen: Vec<Chunk> = (0..5)
                        .filter(|bit| random >> (16 + bit) & 1 == 1)
                        .map(|number| slots.chunks[number])
                        .collect();
                    let free = slots.free.clone();
                    let before: Vec<(Slot, Slot)> = slots
                        .chunks
                        .iter()
                        .map(|&chunk| (slots.current(chunk), slots.target(chunk)))
                        .collect();
                    match slots.assign_targets(chosen.into_iter()) {
                        Ok(()) => taken += 1,
                        Err(_) => {
                            refused += 1;
                            let after = slots
                                .chunks
                                .iter()
                                .map(|&chunk| (slots.current(chunk), slots.target(chunk)));
                            assert!(after.eq(before) && slots.free == free, "refused, and changed");
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
        assert_eq!((slots.current(first), slots.target(first)), (Slot::Home, Slot::Home));
        slots.assign_targets([first].into_iter()).expect("a spare");
        assert_eq!((slots.current(first), slots.target(first)), (Slot::Home, Slot::Spare(0)));
        slots.commit();
        assert_eq!((slots.current(first), slots.target(first)), (Slot::Spare(0), Slot::Spare(0)));
        slots.assign_targets([first, second].into_iter()).expect("home and a spare");
        assert_eq!((slots.target(first), slots.target(second)), (Slot::Home, Slot::Spare(1)));
        slots.revert();
        assert_eq!((slots.current(first), slots.current(second)), (Slot::Spare(0), Slot::Home));
        assert!(slots.in_spares().eq([first]));
        slots.set_all_home();
        assert_eq!((slots.current(first), slots.in_spares().count()), (Slot::Home, 0));
    }

    #[test]
    fn what_is_refused_is_named() {
        let mut slots = Slots::new(&NUMELS, SPARES);
        let chunk = Chunk { tensor: 0, index: 1 };
        let message =
            slots.assign_targets([chunk, chunk].into_iter()).expect_err("twice").to_string();
        assert!(message.contains("chunk `1` of tensor `0`"), "{message}");
        slots.assign_targets([chunk].into_iter()).expect("a spare");
        slots.assign_targets([chunk].into_iter()).expect_err("twice");
        let rest: Vec<Chunk> =
            slots.chunks.iter().copied().filter(|other| *other != chunk).collect();
        let message = slots.assign_targets(rest.into_iter()).expect_err("too many").to_string();
        assert!(message.contains("`4` chunks") && message.contains("`2` of 3"), "{message}");
    }
}
