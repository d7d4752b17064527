//! What a commit writes beside the records of its own step.
//!
//! A step without a commit leaves weights behind, and state that is in host memory (SWAP-6). Where
//! the step of the next commit steps the same chunks, their records have all. Of the others the
//! state is written here, by the commit, and the weights by the caller, who has them.

use std::{
    ops::Range,
    sync::{
        MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{Catalog, Swap, catalog, chunks::Held};
use crate::{
    error::{Error, Result},
    state::{
        chunk::{Chunk, num_chunks},
        layout::Layout,
    },
    stream::view::View,
    tier::volume::{Durability, RecordBuffer},
};

impl Swap {
    /// Whether a commit ends the next step.
    #[must_use]
    pub fn commits_next(&self) -> bool {
        self.durability == Durability::Commit && self.pipeline().commits()
    }

    /// The number of the last step that was made, committed or not; 0: none was.
    fn last_step(&self) -> u64 {
        self.pipeline().step() - 1
    }

    /// The tensors whose weights have changed since the last commit, and which the next one would
    /// lack if its step does not step them.
    #[must_use]
    pub fn weights_behind(&self) -> Vec<usize> {
        let pipeline = self.pipeline();
        let is_behind =
            |tensor: &usize| self.numbers(*tensor).any(|number| pipeline.is_behind(number).weight);
        (0..self.chunks.tensors().len()).filter(is_behind).collect()
    }

    /// The chunks of a tensor.
    pub(super) fn numbers(&self, tensor: usize) -> Range<usize> {
        let held = &self.chunks.tensors()[tensor];
        held.first..held.first + num_chunks(held.place.layout().numel())
    }

    /// The tensor that `weights` are of, and its layout.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor that there is not, or other weights than its.
    pub(super) fn of_weights(&self, tensor: usize, weights: View) -> Result<(&Held, Layout)> {
        let Some(held) = self.chunks.tensors().get(tensor) else {
            return Err(Error::value(format!("tensor `{tensor}` is not the volume's")));
        };
        let layout = *held.place.layout();
        weights.expect("the weight", &[layout.weight()], layout.numel())?;
        Ok((held, layout))
    }

    /// Writes the weights of a tensor, as its last step has left them, for the next commit. Ends
    /// early, with `false`, when `is_interrupted` is set; what is in flight ends with the next
    /// step, or call.
    ///
    /// # Safety
    /// The memory of `weights` is alive, and nothing writes it.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor that there is not, other weights than its, or during a step;
    /// [`Error::Os`] where they cannot be written: every call after it fails (SWAP-3).
    pub unsafe fn write_weights(
        &self,
        tensor: usize,
        weights: View,
        is_interrupted: &AtomicBool,
    ) -> Result<bool> {
        let (held, layout) = self.of_weights(tensor, weights)?;
        let _alone = self.alone()?;
        self.pipeline().check_idle()?;
        let step = self.last_step();
        let write = || {
            // Of an interrupted call some may be in flight.
            if !self.end_writes(is_interrupted)? {
                return Ok(false);
            }
            for number in self.numbers(tensor) {
                if is_interrupted.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                let is_behind = self.pipeline().is_behind(number).weight;
                let Some(record) = self.chunks.weight_record(number).filter(|_| is_behind) else {
                    continue;
                };
                let Some(mut buffer) = self.next_buffer(is_interrupted)? else { return Ok(false) };
                let chunk = Chunk { tensor, index: number - held.first };
                let part = weights.part(chunk.range(layout.numel()));
                let copy = part.at(buffer.as_mut_slice().as_mut_ptr().expose_provenance());
                // SAFETY: the caller vouches for the weights; the buffer is this thread's alone,
                // and has room for the record.
                unsafe { part.copy_to(copy) };
                let ticket = self.volume.write(record, step, buffer)?;
                let mut pipeline = self.pipeline();
                pipeline.writing(ticket);
                pipeline.behind(number).weight = false;
            }
            Ok(true)
        };
        self.or_fail(write())
    }

    /// A buffer, once one is free: the writes before this one have them. None, where
    /// `is_interrupted` is set meanwhile.
    fn next_buffer(&self, is_interrupted: &AtomicBool) -> Result<Option<RecordBuffer>> {
        loop {
            if let Some(buffer) = self.free_buffer() {
                return Ok(Some(buffer));
            }
            match self.end_oldest_write(is_interrupted)? {
                Some(true) => {}
                Some(false) => return Ok(None),
                None => {
                    return self
                        .wait_for(is_interrupted, |timeout| Ok(self.volume.buffer(timeout)));
                }
            }
        }
    }

    /// Whether what is committed is left when the volume ends.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.durability == Durability::Commit && self.volume.is_kept()
    }

    /// Whether the last step that was made is not committed.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.durability == Durability::Commit && self.committed_step() < self.last_step()
    }

    /// The number of the last step that is committed; 0: none is.
    fn committed_step(&self) -> u64 {
        self.volume.step().unwrap_or(0)
    }

    /// Warns where a volume that is kept ends before its last steps are committed.
    pub fn tell_of_uncommitted(&self) {
        if self.is_kept() && self.is_behind() {
            let (last, committed) = (self.last_step(), self.committed_step());
            let kept = match committed {
                0 => "has no commit to go on from".to_owned(),
                _ => format!("is kept at step {committed}, its last commit"),
            };
            log::warn!(
                target: "stepwell",
                "volume `{}` ends at step {last} and {kept}",
                self.volume.name(),
            );
        }
    }

    /// Commits the last step that was made, if it is not committed, between steps.
    ///
    /// # Errors
    /// As [`Swap::write_weights`]; [`Error::Value`] where [`Swap::weights_behind`] are not written:
    /// nothing has changed then.
    pub fn commit_now(&self) -> Result<()> {
        let _alone = self.alone()?;
        self.pipeline().check_idle()?;
        if !self.is_behind() {
            return Ok(());
        }
        let step = self.last_step();
        self.check_weights(step)?;
        let make = || {
            self.end_writes(&AtomicBool::new(false))?;
            self.make_commit(step)
        };
        self.or_fail(make())
    }

    /// Checks that nothing has failed: no step, write or commit.
    ///
    /// # Errors
    /// [`Error::Os`] with the first failure.
    pub fn check(&self) -> Result<()> {
        self.pipeline().check()
    }

    /// Keeps other threads from writing between steps, as long as it lives. A signal's handler may
    /// come while its own thread waits for one that writes.
    fn alone(&self) -> Result<MutexGuard<'_, ()>> {
        self.between_steps.try_lock().map_err(|_| {
            Error::value(
                "a commit is asked for while one is being made, expected it to have ended\n\
                 hint: a signal's handler sets a flag, and the program commits after its step",
            )
        })
    }

    /// Waits for all writes. Ends early, with `false`, when `is_interrupted` is set; what is in
    /// flight is waited for by the next call.
    pub(super) fn end_writes(&self, is_interrupted: &AtomicBool) -> Result<bool> {
        loop {
            match self.end_oldest_write(is_interrupted)? {
                Some(true) => {}
                Some(false) => return Ok(false),
                None => return Ok(true),
            }
        }
    }

    /// Waits for the oldest write. Whether it has ended, and was not left in flight since
    /// `is_interrupted` is set; None: there is none.
    fn end_oldest_write(&self, is_interrupted: &AtomicBool) -> Result<Option<bool>> {
        let mut pipeline = self.pipeline();
        pipeline.check()?;
        let Some(mut ticket) = pipeline.pop_oldest_write() else { return Ok(None) };
        drop(pipeline);
        let has_ended = self.wait_for(is_interrupted, |timeout| ticket.wait(timeout))?.is_some();
        if !has_ended {
            self.pipeline().writing(ticket);
        }
        Ok(Some(has_ended))
    }

    fn check_weights(&self, step: u64) -> Result<()> {
        match self.weights_behind().first() {
            None => Ok(()),
            Some(tensor) => Err(Error::value(format!(
                "step `{step}` is to be committed without the weights of tensor `{tensor}`, which \
                 were stepped since the last commit, expected them to be written before"
            ))),
        }
    }

    /// Commits `step`, whose own records are written.
    pub(super) fn make_commit(&self, step: u64) -> Result<()> {
        if self.durability == Durability::Commit {
            self.check_weights(step)?;
            self.write_states(step)?;
            self.write_catalog(step)?;
        }
        self.volume.commit(step)
    }

    /// Writes the state in host memory that is behind.
    fn write_states(&self, step: u64) -> Result<()> {
        let never = AtomicBool::new(false);
        for number in 0..self.chunks.in_ram() {
            let record = self.chunks.record(number);
            let is_behind = std::mem::take(&mut self.pipeline().behind(number).state);
            let (Some(record), Some(offset), true) =
                (record, self.chunks.ram_offset(number), is_behind)
            else {
                continue;
            };
            let mut buffer =
                self.next_buffer(&never)?.unwrap_or_else(|| unreachable!("nothing interrupts it"));
            let nbytes = self.chunks.state_nbytes(number);
            buffer.as_mut_slice()[..nbytes].copy_from_slice(self.ram_slice(offset, nbytes));
            let ticket = self.volume.write(record, step, buffer)?;
            self.pipeline().writing(ticket);
        }
        self.end_writes(&never).map(drop)
    }

    /// Writes the catalog, for the commit of `step`.
    fn write_catalog(&self, step: u64) -> Result<()> {
        let mut buffer = self.buffer()?;
        let catalog = Catalog { run: self.run, counts: self.pipeline().counts().to_vec() };
        catalog::encode(&self.chunks.layouts(), self.identity, &catalog, buffer.as_mut_slice());
        self.end_of(self.volume.write(self.chunks.catalog_record(), step, buffer)?)?;
        Ok(())
    }
}
