//! Steps that can be taken back to the bit: out of place, from slot to slot in host memory.
//!
//! [`HostSlots`] holds the index of the chunks of a list of tensors ([`crate::tier::slots`]: SLOT-1
//! to SLOT-4) and the memory of their spare slots, all of it allocated at once: `spares` times what
//! the largest chunk needs, whatever the layouts. Where a part lies in a slot, its layout says
//! ([`crate::state::layout`]).
//!
//! - REV-1 A [`Revocable`] writes to no slot that holds the state of a chunk. Commit and revert
//!   flip the index and touch no state; dropped, also by a panic, it reverts.
//! - REV-2 A call that is refused changes nothing, and leaves the calls before it as they were.
//! - REV-3 Every chunk that was stepped has been published ([`crate::stream::cursor::publish`])
//!   when the call returns.
//! - REV-4 The state of a chunk in a spare is not in the tensors: these hold what it was one commit
//!   ago, or what was reverted. Until [`HostSlots::copy_home`] no code may read them, and what is
//!   written there is lost.
//!
//! Cost: a step out of place takes a fifth to a quarter more time than one in place, in either
//! direction: split with fp32 moments from DRAM on one core, 0.70 for 0.57 ns per parameter
//! (`benches/adam.rs`). Commit and revert take some nanoseconds per chunk. Copying home copies each
//! state that is in a spare once, which takes one and a half times as long as a step of it. So a
//! caller that commits every step lets chunks alternate, and copies home when the tensors are read.
//! Slots and index are allocated with the [`HostSlots`]; a step has lists of its tensors and chunks
//! beside them ([`crate::adam::batch`]).

use crate::{
    adam::{
        Hyper,
        batch::{check, step_all},
        tensor::AdamTensor,
    },
    error::{Error, Result},
    host::{
        memory::{Buffer, BufferConfig},
        pool::Pool,
    },
    simd::isa::Isa,
    state::{chunk::Chunk, layout::Layout},
    stream::view::{Route, check_disjoint},
    tier::slots::{Slot, Slots},
};

/// Slots for the state of a list of tensors, home and spare. See the [module](self).
///
/// Dropped while states are in spares, it takes them with it: [`copy_home`](HostSlots::copy_home)
/// first.
#[derive(Debug)]
pub struct HostSlots {
    index: Slots,
    layouts: Box<[Layout]>,
    memory: Buffer,
    slot_nbytes: usize,
}

/// A layout as messages show it.
fn text(layout: &Layout) -> String {
    let fields: Vec<String> =
        layout.fields().map(|field| format!("{} {}", field.part.name, field.part.dtype)).collect();
    format!("{} elements: {}", layout.numel(), fields.join(", "))
}

impl HostSlots {
    /// Slots for the chunks of these tensors, all at home, and `spares` more that fit any of them,
    /// faulted in on the workers of `pool`.
    ///
    /// # Errors
    /// [`Error::Value`] for a size beyond the address space; [`Error::Os`] where the system has no
    /// such memory.
    pub fn new(tensors: &[AdamTensor], spares: usize, pool: &Pool) -> Result<Self> {
        let first_chunk = |tensor: &AdamTensor| tensor.layout().chunk(0).slot_nbytes();
        let slot_nbytes = tensors.iter().map(first_chunk).max().unwrap_or(0);
        let nbytes = slot_nbytes.checked_mul(spares).ok_or_else(|| {
            Error::value(format!(
                "spares is `{spares}`, expected slots of {slot_nbytes} bytes that fit into memory"
            ))
        })?;
        let numels: Vec<usize> = tensors.iter().map(|tensor| tensor.param.numel()).collect();
        Ok(Self {
            memory: Buffer::new(nbytes, &BufferConfig::default(), pool)?,
            index: Slots::new(&numels, spares),
            layouts: tensors.iter().map(|tensor| *tensor.layout()).collect(),
            slot_nbytes,
        })
    }

    /// How many chunks have their state in a spare.
    #[must_use]
    pub fn num_in_spares(&self) -> usize {
        self.index.in_spares().count()
    }

    /// The size of a spare slot.
    #[must_use]
    pub fn slot_nbytes(&self) -> usize {
        self.slot_nbytes
    }

    /// Begins steps that can be taken back.
    pub fn begin(&mut self) -> Revocable<'_> {
        // What was neither committed nor dropped, but forgotten, is taken back too.
        self.index.revert();
        Revocable { slots: self }
    }

    /// Copies home what is in spares, so that the tensors (all of them, in the order of
    /// [`HostSlots::new`]) hold the whole state. All spares are free then.
    ///
    /// # Safety
    /// The memory of all views is alive, and nothing else uses it during the call.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing copied, for other tensors than those that the slots are for,
    /// or memory that overlaps.
    pub unsafe fn copy_home(&mut self, pool: &Pool, tensors: &[AdamTensor]) -> Result<()> {
        if tensors.len() != self.layouts.len() {
            return Err(Error::value(format!(
                "`{}` tensors, expected all {}",
                tensors.len(),
                self.layouts.len()
            )));
        }
        tensors.iter().enumerate().try_for_each(|(index, tensor)| self.check(index, tensor))?;
        check_disjoint(tensors.iter().flat_map(AdamTensor::written), std::iter::empty())?;
        let in_spares: Vec<Chunk> = self.index.in_spares().collect();
        pool.run(in_spares.len(), &|task| {
            let chunk = in_spares[task];
            let state =
                self.between(&tensors[chunk.tensor], chunk, self.index.current(chunk), Slot::Home);
            for (_, Route { from, to }) in state.written() {
                // SAFETY: the caller vouches for the tensors, which are disjoint as checked, and so
                // are chunks; the slot is ours, and the chunk's alone (SLOT-1).
                unsafe { from.copy_to(to) };
            }
        });
        self.index.set_all_home();
        Ok(())
    }

    /// Where a step of this chunk of a tensor reads its state and where it writes it; in place, but
    /// for what a [`Revocable`] steps.
    pub(crate) fn route(&self, tensor: &AdamTensor, chunk: Chunk) -> AdamTensor<Route> {
        self.between(tensor, chunk, self.index.current(chunk), self.index.target(chunk))
    }

    fn between(
        &self,
        tensor: &AdamTensor,
        chunk: Chunk,
        from: Slot,
        to: Slot,
    ) -> AdamTensor<Route> {
        tensor.chunk(chunk.index).map(|field, home| {
            let place = |slot| match slot {
                Slot::Home => home,
                Slot::Spare(number) => home.at(self.address(number) + field.offset),
            };
            Route { from: place(from), to: place(to) }
        })
    }

    /// Where a spare slot begins.
    fn address(&self, spare: usize) -> usize {
        self.memory.as_ptr().expose_provenance() + spare * self.slot_nbytes
    }

    fn check(&self, index: usize, tensor: &AdamTensor) -> Result<()> {
        let Some(expected) = self.layouts.get(index) else {
            return Err(Error::value(format!(
                "tensor `{index}`, expected one of the {} with slots",
                self.layouts.len()
            )));
        };
        let given = tensor.layout();
        if given == expected {
            return Ok(());
        }
        Err(Error::value(format!(
            "tensor {index} has `{}`, expected {}, as when its slots were made",
            text(given),
            text(expected)
        )))
    }
}

/// Steps that are not final: [`commit`](Revocable::commit) makes them so, and
/// [`revert`](Revocable::revert), or dropping it, takes them back.
#[derive(Debug)]
#[must_use = "dropped, it takes its steps back"]
pub struct Revocable<'a> {
    slots: &'a mut HostSlots,
}

impl Revocable<'_> {
    /// Steps these tensors, each with its number in the list that the slots are for; `counts[i]` is
    /// the number of this update of `tensors[i]`, from 1. Each tensor once until the commit.
    ///
    /// # Safety
    /// The memory of all views is alive, and nothing else uses it during the call; of chunks that
    /// are in spares, until they are copied home (REV-4).
    ///
    /// # Errors
    /// [`Error::Value`], before anything is changed, for what [`crate::adam::batch::step`] refuses,
    /// tensors that the slots are not for or that have been stepped already, or where fewer spare
    /// slots are free than there are chunks at home.
    pub unsafe fn step(
        &mut self,
        pool: &Pool,
        isa: Isa,
        tensors: &[(usize, AdamTensor)],
        counts: &[u64],
        hyper: &Hyper,
    ) -> Result<()> {
        let (numbers, tensors): (Vec<usize>, Vec<AdamTensor>) = tensors.iter().copied().unzip();
        let grads = check(&tensors, counts, hyper)?;
        numbers
            .iter()
            .zip(&tensors)
            .try_for_each(|(&number, tensor)| self.slots.check(number, tensor))?;
        // The index numbers tensors as the list does, a call as it gives them.
        let indexed = |chunk: Chunk| Chunk { tensor: numbers[chunk.tensor], ..chunk };
        let chunks = Chunk::all(tensors.iter().map(|tensor| tensor.param.numel()));
        self.slots.index.assign_targets(chunks.iter().copied().map(indexed))?;
        let slots = &*self.slots;
        let route = |chunk: Chunk| slots.route(&tensors[chunk.tensor], indexed(chunk));
        // SAFETY: the caller vouches for the tensors, whose views are disjoint, as checked; spares
        // are ours, and each chunk has its own (SLOT-1), which is not what it is read from
        // (SLOT-2).
        unsafe { step_all(pool, isa, &grads, counts, hyper, route) };
        Ok(())
    }

    /// The steps are final. The states of their chunks are where they were written: those that were
    /// at home are in spares, the others are at home again.
    pub fn commit(self) {
        self.slots.index.commit();
    }

    /// The steps are undone, to the bit.
    pub fn revert(self) {}
}

impl Drop for Revocable<'_> {
    fn drop(&mut self) {
        self.slots.index.revert();
    }
}
