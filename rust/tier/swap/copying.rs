//! State that is copied out of a swap, between steps: for state dicts, and when it is opened again.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use super::{
    Catalog, Swap,
    catalog::{self, NoCatalog},
};
use crate::{
    adam::{
        exchange::{round, widen},
        tensor::AdamTensor,
    },
    error::{Error, Result},
    state::{
        chunk::{CHUNK_LEN, Chunk},
        layout::Field,
    },
    stream::{element::Dtype, view::View},
    tier::volume::{Durability, RecordBuffer, Ticket},
};

/// Records that are in flight at once, and buffers for them.
const IN_FLIGHT: usize = 32;

impl Swap {
    /// Copies the state of a tensor to the memory that `to` names, as it is after the last step: of
    /// the chunks that have some of `elements`. Ends early, with `false`, when `is_interrupted` is
    /// set, also while drives do not answer: the next call waits for what they still have.
    ///
    /// # Safety
    /// The memory of the parts of `to`, but for its fingerprints, is alive, and nothing else uses
    /// it. Where the parameter is a master, that is so for it too, and its rounded copy is only
    /// read.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor or elements that there are not, or of another layout, or
    /// during a step; [`Error::Os`] where the volume cannot be read.
    pub unsafe fn read(
        &self,
        tensor: usize,
        to: &AdamTensor,
        elements: Range<usize>,
        is_interrupted: &AtomicBool,
    ) -> Result<bool> {
        let held = self.chunks.tensors().get(tensor).ok_or_else(|| {
            let all = self.chunks.tensors().len();
            Error::value(format!("tensor `{tensor}`, expected one of the volume's {all}"))
        })?;
        held.check(to)?;
        if held.is_placed(to) {
            return Err(Error::value("state is to be copied to its own place, expected memory"));
        }
        let numel = to.layout().numel();
        if elements.start > elements.end || elements.end > numel {
            return Err(Error::value(format!(
                "the elements `{elements:?}` of a tensor are to be copied, expected some of its \
                 {numel}"
            )));
        }
        self.pipeline().check_idle()?;
        let [begin, end] = [elements.start / CHUNK_LEN, elements.end.div_ceil(CHUNK_LEN)];
        let numbers = held.first + begin..held.first + end;
        let copy = |number: usize, from: Option<usize>| {
            let chunk = to.chunk(number - held.first);
            let layout = *chunk.layout();
            if let (true, Some(address)) = (held.is_packed, from) {
                // SAFETY: as below.
                unsafe { self.unpack(number, address, chunk.weight(), chunk.param) }?;
            }
            chunk.map(|field, to| {
                if let Some(offset) = held.record_offset(&layout, &field)
                    && !(held.packs(&field) && from.is_some())
                {
                    // SAFETY: the caller vouches for `to`, of which each chunk is copied once;
                    // what it is copied from is this chunk's in a buffer, or in the swap's own
                    // memory, which nothing writes between steps.
                    unsafe {
                        match from {
                            Some(address) => to.at(address + offset).copy_to(to),
                            None => self.begin_state(&field, to, chunk.weight_out),
                        }
                    }
                }
            });
            Ok(())
        };
        self.each(numbers, is_interrupted, copy)
    }

    /// Reads what is on the volume of these chunks, and calls `copy` with the number of each and
    /// where its state is; None: it was never stepped.
    fn each(
        &self,
        numbers: Range<usize>,
        is_interrupted: &AtomicBool,
        copy: impl Fn(usize, Option<usize>) -> Result<()>,
    ) -> Result<bool> {
        let mut on_volume = Vec::new();
        for number in numbers {
            if is_interrupted.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if !self.pipeline().has_state(number) {
                copy(number, None)?;
            } else if let Some(offset) = self.chunks.ram_offset(number) {
                copy(number, Some(self.ram.as_ptr().expose_provenance() + offset))?;
            } else {
                let record = self.chunks.record(number);
                on_volume.push((number, record.unwrap_or_else(|| unreachable!("not in RAM"))));
            }
        }
        self.read_records(&on_volume, is_interrupted, |number, address| copy(number, Some(address)))
    }

    /// Reads records of chunks, several at once, and calls `copy` with the number of each chunk and
    /// where its record is. Ends early, with `false`, as [`Swap::read`].
    fn read_records(
        &self,
        records: &[(usize, usize)],
        is_interrupted: &AtomicBool,
        copy: impl Fn(usize, usize) -> Result<()>,
    ) -> Result<bool> {
        // They have buffers until they are waited for.
        if !self.end_writes(is_interrupted)? {
            return Ok(false);
        }
        let mut reads: VecDeque<(usize, Ticket)> = VecDeque::new();
        let end_first = |reads: &mut VecDeque<(usize, Ticket)>| -> Result<bool> {
            let Some((number, mut ticket)) = reads.pop_front() else { return Ok(true) };
            let buffer = self.wait_for(is_interrupted, |timeout| ticket.wait(timeout))?;
            if let Some(buffer) = &buffer {
                copy(number, buffer.as_ptr().expose_provenance())?;
            }
            Ok(buffer.is_some())
        };
        for &(number, record) in records {
            let buffer = loop {
                if is_interrupted.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                if reads.len() < IN_FLIGHT
                    && let Some(buffer) = self.free_buffer()
                {
                    break buffer;
                }
                if reads.is_empty() {
                    // Reads that an interrupted call has left still have the buffers.
                    let free = |timeout| Ok(self.volume.buffer(timeout));
                    match self.wait_for(is_interrupted, free)? {
                        Some(buffer) => break buffer,
                        None => return Ok(false),
                    }
                }
                if !end_first(&mut reads)? {
                    return Ok(false);
                }
            };
            reads.push_back((number, self.volume.read(record, buffer)?));
        }
        while !reads.is_empty() {
            if !end_first(&mut reads)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn free_buffer(&self) -> Option<RecordBuffer> {
        let spare = self.pipeline().spare.pop();
        spare.or_else(|| self.volume.buffer(Duration::ZERO))
    }

    // ---- what is found when it is opened again ----

    /// Reads the catalog of the committed step.
    pub(super) fn read_catalog(&self) -> Result<Option<Catalog>> {
        let name = self.volume.name();
        let expected = self.chunks.record_nbytes();
        let is_same = || {
            self.volume.num_records() == expected.len()
                && expected.iter().enumerate().all(|(record, &nbytes)| {
                    self.volume.record_nbytes(record).is_ok_and(|found| found == nbytes)
                })
        };
        let Some(step) = self.volume.step() else {
            return if is_same() {
                Ok(None)
            } else {
                Err(Error::value(format!(
                    "volume `{name}` has no committed step, and was made for other parameters, or \
                     other moments, expected those of this optimizer\nhint: `stepwell volume rm \
                     DRIVE... --name {name}`"
                )))
            };
        };
        let other = || {
            Error::value(format!(
                "volume `{name}` has the state of other parameters, or other moments, expected \
                 those of this optimizer, with their names and shapes, in their order\nhint: the \
                 names (of the model, or of the wrapped one), moments, `shard` and requires_grad \
                 of the run that made it; or go on from a checkpoint"
            ))
        };
        // In any version it is the last record, of other bytes.
        let record = self.volume.num_records().checked_sub(1).ok_or_else(other)?;
        if !self.volume.is_written(record)? {
            return Err(other());
        }
        let nbytes = self.volume.record_nbytes(record)?;
        let buffer = self.end_of(self.volume.read(record, self.buffer()?)?)?;
        let bytes = &buffer.as_slice()[..nbytes];
        let catalog = catalog::decode(&self.chunks.layouts(), self.identity, bytes).map_err(
            |why| match why {
                NoCatalog::Foreign => other(),
                NoCatalog::Release { what, found, expected } => Error::value(format!(
                    "volume `{name}` has the {what} of version `{found}`, expected {expected}: \
                     another release made it\nhint: go on with that release; or from a \
                     checkpoint, after `stepwell volume rm DRIVE... --name {name}`"
                )),
            },
        )?;
        if !is_same() {
            return Err(other());
        }
        self.pipeline().resume(step, &catalog.counts);
        Ok(Some(catalog))
    }

    pub(super) fn buffer(&self) -> Result<RecordBuffer> {
        self.volume.buffer(self.io_timeout).ok_or_else(|| self.volume.no_answer())
    }

    /// Finds which chunks have state, and reads that of those in host memory.
    pub(super) fn find_state(&self) -> Result<()> {
        let mut in_ram = Vec::new();
        for number in 0..self.chunks.count() {
            let Some(record) = self.chunks.record(number) else { continue };
            if !self.volume.is_written(record)? {
                continue;
            }
            self.pipeline().set_has_state(number);
            if self.chunks.is_in_ram(number) {
                in_ram.push((number, record));
            }
        }
        self.read_records(&in_ram, &AtomicBool::new(false), |number, address| {
            let Some(offset) = self.chunks.ram_offset(number) else { return Ok(()) };
            let nbytes = self.chunks.state_nbytes(number);
            assert!(offset + nbytes <= self.ram.nbytes());
            let from = std::ptr::with_exposed_provenance::<u8>(address);
            // SAFETY: within the swap's own memory, which nothing else uses before it is made; the
            // buffer has the record of a chunk of as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, self.ram.as_ptr().add(offset), nbytes) };
            Ok(())
        })
        .map(|_| ())
    }

    /// Copies the weights of a tensor that were written last to `to`, where it was ever stepped. Of
    /// a volume that was opened they are those of the committed step. Ends early, with `false`, as
    /// [`Swap::read`].
    ///
    /// # Safety
    /// As [`Swap::read`].
    ///
    /// # Errors
    /// As [`Swap::read`]; [`Error::Value`] where commits hold no weights.
    pub unsafe fn read_weights(
        &self,
        tensor: usize,
        to: View,
        is_interrupted: &AtomicBool,
    ) -> Result<bool> {
        let (held, layout) = self.of_weights(tensor, to)?;
        self.pipeline().check_idle()?;
        if self.durability != Durability::Commit {
            return Err(Error::value(
                "weights are asked for, expected a volume with durability commit",
            ));
        }
        let mut written = Vec::new();
        for number in self.numbers(tensor) {
            let state = || self.chunks.record(number).unwrap_or_else(|| unreachable!("all have"));
            let record = self.chunks.weight_record(number).unwrap_or_else(state);
            if self.volume.is_written(record)? {
                written.push((number, record));
            }
        }
        self.read_records(&written, is_interrupted, |number, address| {
            let index = number - held.first;
            let part = to.part(Chunk { tensor, index }.range(layout.numel()));
            // SAFETY: the caller vouches for `to`; the buffer is this thread's, and has the record
            // of a chunk of as many elements.
            unsafe {
                match held.record_master_offset(&layout.chunk(index)) {
                    None => part.at(address).copy_to(part),
                    Some(offset) => {
                        let master = View::new(address + offset, Dtype::Float32, part.numel())?;
                        round(self.isa, master, part);
                    }
                }
            }
            Ok(())
        })
    }
}

impl Swap {
    /// Writes what a field of a record is before the first step: zeros, and of a master the weight,
    /// `weight_out`.
    ///
    /// # Safety
    /// The field's memory is alive, and nothing else uses it; nothing writes the weight.
    pub(super) unsafe fn begin_state(&self, field: &Field, to: View, weight_out: Option<View>) {
        // SAFETY: passed on from the caller.
        unsafe {
            match weight_out {
                Some(weight) if field.is_param() => widen(self.isa, weight, to),
                _ => zero(to),
            }
        }
    }
}

/// Fills a view with zeros.
///
/// # Safety
/// Its memory is alive, and nothing else uses it.
unsafe fn zero(view: View) {
    let begin = std::ptr::with_exposed_provenance_mut::<u8>(view.address());
    // SAFETY: passed on from the caller; zeros are values of every dtype.
    unsafe { begin.write_bytes(0, view.nbytes()) };
}
