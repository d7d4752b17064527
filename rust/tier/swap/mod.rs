//! State on a volume: each chunk's is read into a buffer, stepped there, and written back.
//!
//! A [`Swap`] has the state of a list of tensors. Of each chunk it is a record of its [`Volume`],
//! or in host memory of its own: as many of the first chunks as the memory has room for. Weights
//! and fingerprints stay where the engine has them, in host memory. The weight is the parameter, or
//! its rounded copy where it has one: then the parameter is the master, and state.
//!
//! ```text
//!             order of the step -->
//! volume      | read | read | read |                 | write | write |
//! buffers            ahead of the workers      step      behind them
//! host memory                                  step, in place
//! ```
//!
//! A tensor that is stepped names either its *place*, addresses that nothing is at, or memory that
//! state was loaded to. From a place, the step goes on from what the swap has. From memory it goes
//! on from that, and is written to the swap: so state that is loaded comes here with its first
//! step, and costs no read.
//!
//! - SWAP-1 Buffers are given to chunks in the order of the step, those that are not read
//!   included. With TIER-4 there is one for every chunk in the end, however few there are.
//! - SWAP-2 What is stepped is in a buffer that the swap holds from the fetch to the store. It is
//!   the request's until the write has ended.
//! - SWAP-3 The first failure is the last: every call after it fails. With [`Durability::Commit`]
//!   the volume is at its last committed step then.
//! - SWAP-4 A chunk that no step has written reads as state that was never stepped: zeros, and a
//!   master that is the weight.
//! - SWAP-5 With [`Durability::Commit`] a commit holds all that the next step goes on from: the
//!   state of every chunk that was ever stepped, also of those in host memory, their weights, the
//!   count of updates of each tensor, and which run made it (`catalog.rs`).
//! - SWAP-6 A commit ends the first step of a new volume, so that there is one to go on from, and
//!   each step whose number is a multiple of [`Config::commit_interval`]. The others write no
//!   weights, and no state that is in host memory. What a commit then lacks of chunks that its own
//!   step does not step is written before it: state by the commit, weights by
//!   [`Swap::write_weights`]. A commit without them fails.
//! - SWAP-7 A packed master (`packed.rs`) is what its record has together with the weight, which
//!   stays in host memory. Only steps write that. A checksum finds a weight that something else has
//!   written: reads of its master fail then. A worker steps it in memory of its own.
//!
//! Cost per parameter and step: the bytes of its state, read once and written once (bf16 with
//! moments in fp32: 10 + 10 B, with a packed fp32 master .1 B more, not packed 12 + 12 B; in q8:
//! 4.1 + 4.1 B), of a chunk in host memory nothing. In steps that are committed a weight that does
//! not follow from an fp32 master is written as well (2 B of a bf16 parameter), and state in host
//! memory is written and not read. Memory: the buffers, whose number [`Swap::create`] chooses, 82 B
//! per chunk, and 256 KiB of each worker where masters are packed.
//!
//! The order of chunks is the forward's in every step. Where it alternates, what is left in the
//! buffers of one step begins the next: at most the buffers' share of the state, 17 MB for a drive
//! and some for each worker, so .3 % of the state of 1.2 B parameters. And the first weights of
//! every second forward would be the last to land.

mod catalog;
mod chunks;
mod committing;
mod config;
mod copying;
mod packed;
mod pipeline;

use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

pub use self::{catalog::Catalog, config::Config};
use self::{
    chunks::{Chunks, Held},
    pipeline::{Behind, Pipeline},
};
use super::{
    Planned, Stored, Tier,
    volume::{Durability, Options, RecordBuffer, Shape, Ticket, Volume, found},
};
use crate::{
    adam::{batch::in_place, tensor::AdamTensor},
    error::{Error, Result},
    host::{
        memory::{Buffer, BufferConfig},
        pool::Pool,
    },
    simd::isa::Isa,
    state::chunk::Chunk,
    stream::{cursor::publish, view::Route},
};

/// How long a wait lasts before it looks whether another thread has failed, or was interrupted.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// See the [module](self).
pub struct Swap {
    volume: Volume,
    durability: Durability,
    counts_each_step: bool,
    identity: u64,
    run: u64,
    chunks: Chunks,
    /// The state of the chunks that are in host memory.
    ram: Buffer,
    pipeline: Mutex<Pipeline>,
    /// A chunk was stored or was given its buffers, or something has failed.
    changed: Condvar,
    /// Held by what writes between steps.
    between_steps: Mutex<()>,
    io_timeout: Duration,
    isa: Isa,
}

impl fmt::Debug for Swap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, in_ram) = (self.chunks.count(), self.chunks.in_ram());
        write!(f, "Swap({:?}, {all} chunks, {in_ram} in host memory)", self.volume)
    }
}

impl Swap {
    /// Makes one for tensors of these places, all state zero, and takes its space. What the places
    /// say of memory is never read or written.
    ///
    /// # Errors
    /// As [`Volume::create`]; [`Error::Value`] for tensors without elements.
    pub fn create(config: &Config, places: &[AdamTensor], pool: &Pool) -> Result<Self> {
        config.check_packed(places)?;
        let chunks = config.chunks(places, config.durability);
        let shape = Shape {
            weights: config.weights.clone(),
            stripe_bytes: config.stripe_bytes,
            durability: config.durability,
            ..Shape::new(chunks.record_nbytes())
        };
        if shape.record_nbytes.is_empty() {
            return Err(Error::value("a volume is made for no state, expected some"));
        }
        let volume = Volume::create(&config.location, &shape, &config.options(&chunks), pool)?;
        Self::of(volume, config, chunks, pool)
    }

    /// Opens one that was kept, or left by a process that has ended, at its last committed step, or
    /// at that of the options; and what that says of the run that made it. What is in host memory
    /// is read. Where there is none, or none with a committed step, it is a new one, and no
    /// catalog.
    ///
    /// # Errors
    /// As [`Volume::open`] and [`Swap::create`]; [`Error::Value`] where it was made for other
    /// tensors, or by a release whose catalog or state has another version.
    pub fn open(
        config: &Config,
        places: &[AdamTensor],
        pool: &Pool,
    ) -> Result<(Self, Option<Catalog>)> {
        let Options { step, lock_timeout, .. } = config.options;
        if step.is_none() && found::is_absent(&config.location, lock_timeout)? {
            let swap = Self::create(config, places, pool)?;
            swap.tell_of_beginning();
            return Ok((swap, None));
        }
        config.check_packed(places)?;
        let chunks = config.chunks(places, Durability::Commit);
        // Whatever is wrong with it, it is not removed.
        let options = Options { keep: true, ..config.options(&chunks) };
        let volume = Volume::open(&config.location, &options, pool)?;
        let swap = Self::of(volume, config, chunks, pool)?;
        let catalog = swap.read_catalog()?;
        match catalog {
            Some(_) => swap.find_state()?,
            None => swap.tell_of_beginning(),
        }
        swap.volume.set_keep(config.options.keep);
        Ok((swap, catalog))
    }

    fn tell_of_beginning(&self) {
        log::warn!(
            target: "stepwell",
            "volume `{}` has no committed step to go on from, and begins; hint: where it has, its \
             drives and its name are those that it was made with",
            self.volume.name()
        );
    }

    fn of(volume: Volume, config: &Config, chunks: Chunks, pool: &Pool) -> Result<Self> {
        Ok(Self {
            ram: Buffer::new(chunks.ram_nbytes(), &BufferConfig::default(), pool)?,
            pipeline: Mutex::new(Pipeline::new(
                chunks.count(),
                chunks.tensors().len(),
                config.steps_per_commit(),
            )),
            changed: Condvar::new(),
            between_steps: Mutex::new(()),
            durability: config.durability,
            counts_each_step: config.counts_each_step,
            identity: config.identity,
            run: config.run,
            io_timeout: config.options.io_timeout,
            isa: Isa::detect()?,
            chunks,
            volume,
        })
    }

    /// Its volume.
    #[must_use]
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Bytes of host memory: for the state of the first chunks, and for buffers.
    #[must_use]
    pub fn memory_nbytes(&self) -> (usize, usize) {
        (self.chunks.ram_nbytes(), self.volume.buffers_nbytes())
    }

    fn pipeline(&self) -> MutexGuard<'_, Pipeline> {
        self.pipeline.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `done`, and if it is a failure, the last thing that is done.
    fn or_fail<T>(&self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            self.pipeline().fail(error);
            self.changed.notify_all();
        }
        done
    }

    /// Waits for a read or write to end.
    fn end_of(&self, mut ticket: Ticket) -> Result<RecordBuffer> {
        let never = AtomicBool::new(false);
        let buffer = self.wait_for(&never, |timeout| ticket.wait(timeout))?;
        Ok(buffer.unwrap_or_else(|| unreachable!("nothing interrupts it")))
    }

    /// What `wait` gives, which is called with a timeout until it does. Nothing, where
    /// `is_interrupted` is set meanwhile.
    fn wait_for<T>(
        &self,
        is_interrupted: &AtomicBool,
        mut wait: impl FnMut(Duration) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut waited = Duration::ZERO;
        while !is_interrupted.load(Ordering::Relaxed) {
            if let Some(found) = wait(LOOK_INTERVAL)? {
                return Ok(Some(found));
            }
            waited += LOOK_INTERVAL;
            if waited >= self.io_timeout {
                return Err(self.volume.no_answer());
            }
        }
        Ok(None)
    }

    // ---- a step ----

    fn begin(&self, runs: &mut dyn Iterator<Item = Planned<'_>>) -> Result<()> {
        // Of a call between steps that was interrupted some may be in flight.
        let ended = self.end_writes(&AtomicBool::new(false));
        self.or_fail(ended)?;
        let mut pipeline = self.pipeline();
        pipeline.check()?;
        pipeline.begin();
        self.volume.set_flushes(pipeline.commits());
        for run in runs {
            let held = &self.chunks.tensors()[run.tensor];
            held.check(run.state)?;
            let is_placed = held.is_placed(run.state);
            pipeline.set_tensor(run.tensor, run.count);
            for number in held.first + run.begin..held.first + run.end {
                if self.has_buffer(&pipeline, number) {
                    let is_read =
                        is_placed && !self.chunks.is_in_ram(number) && pipeline.has_state(number);
                    pipeline.plan(number, is_read);
                }
            }
        }
        let pumped = self.pump(&mut pipeline);
        drop(pipeline);
        self.or_fail(pumped.map(|_| ()))
    }

    /// Gives buffers to the next chunks, and begins to read them, as far as buffers are free.
    /// Whether it has given any: a worker may wait for one of them.
    fn pump(&self, pipeline: &mut Pipeline) -> Result<bool> {
        pipeline.check()?;
        let mut is_any_given = false;
        while let Some(ticket) = pipeline.pop_written() {
            // It is over: its buffer is free when it is dropped.
            self.end_of(ticket)?;
        }
        while let Some((number, is_read)) = pipeline.next() {
            let has_weight = pipeline.commits() && self.chunks.weight_record(number).is_some();
            let needed = 1 + usize::from(has_weight);
            while pipeline.spare.len() < needed {
                let Some(buffer) = self.volume.buffer(Duration::ZERO) else {
                    return Ok(is_any_given);
                };
                pipeline.spare.push(buffer);
            }
            let weight = if needed == 2 { pipeline.spare.pop() } else { None };
            let Some(state) = pipeline.spare.pop() else { return Ok(is_any_given) };
            let record =
                self.chunks.record(number).unwrap_or_else(|| unreachable!("it is planned"));
            if is_read {
                pipeline.reading(number, self.volume.read(record, state)?, weight);
            } else {
                pipeline.given(number, state, weight);
            }
            is_any_given = true;
        }
        Ok(is_any_given)
    }

    fn fetch(&self, held: &Held, tensor: &AdamTensor, chunk: Chunk) -> Result<AdamTensor<Route>> {
        let number = held.first + chunk.index;
        let has_buffer = self.has_buffer(&self.pipeline(), number);
        let memory = if has_buffer { Some(self.buffer_of(number)?) } else { None };
        let address = self.chunks.ram_offset(number).map_or_else(
            || memory.unwrap_or_else(|| unreachable!("it is in host memory or has a buffer")),
            |offset| self.ram.as_ptr().expose_provenance() + offset,
        );
        let is_placed = held.is_placed(tensor);
        let state = tensor.chunk(chunk.index);
        let layout = *state.layout();
        let mut routes = in_place(&state);
        let is_fresh = is_placed && !self.pipeline().has_state(number);
        if held.is_packed && is_placed && !is_fresh {
            let master = state.param.at(packed::scratch());
            // SAFETY: the weight is lent to the step, and this worker has the chunk; the rest is
            // its own, or the chunk's.
            let unpacked = unsafe { self.unpack(number, address, state.weight(), master) };
            self.or_fail(unpacked)?;
        }
        routes = routes.map(|field, route| match held.record_offset(&layout, &field) {
            None => route,
            Some(offset) => {
                let to = route.to.at(match held.packs(&field) {
                    true => packed::scratch(),
                    false => address + offset,
                });
                if is_fresh {
                    // SAFETY: the memory is this chunk's, and only this worker uses it, and the
                    // weight of this chunk.
                    unsafe { self.begin_state(&field, to, state.weight_out) };
                }
                Route { from: if is_placed { to } else { route.from }, to }
            }
        });
        Ok(routes)
    }

    /// Where the buffer of a chunk's state is, when its state is there.
    fn buffer_of(&self, number: usize) -> Result<usize> {
        let found = self.wait_for_buffer(number);
        self.or_fail(found)
    }

    fn wait_for_buffer(&self, number: usize) -> Result<usize> {
        let mut pipeline = self.pipeline();
        loop {
            if self.pump(&mut pipeline)? {
                self.changed.notify_all();
            }
            if let Some(ticket) = pipeline.take_reading(number) {
                drop(pipeline);
                let buffer = self.end_of(ticket)?;
                return Ok(self.pipeline().read(number, buffer));
            }
            if let Some(address) = pipeline.address(number) {
                return Ok(address);
            }
            // The buffers are in writes, or with other workers.
            if let Some(ticket) = pipeline.pop_oldest_write() {
                drop(pipeline);
                drop(self.end_of(ticket)?);
                pipeline = self.pipeline();
            } else {
                (pipeline, _) = self
                    .changed
                    .wait_timeout(pipeline, LOOK_INTERVAL)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn store(&self, held: &Held, tensor: &AdamTensor, chunk: Chunk) -> Result<Stored> {
        // Where it came from other memory, stores have bypassed the cache.
        publish();
        let number = held.first + chunk.index;
        if held.is_packed {
            let packed = self.pack(number, tensor.weight(), chunk);
            self.or_fail(packed)?;
        }
        let mut pipeline = self.pipeline();
        let commits = self.durability == Durability::Commit && pipeline.commits();
        if self.has_buffer(&pipeline, number) {
            drop(pipeline);
            let written = self.write(number, tensor, chunk);
            self.or_fail(written)?;
        } else {
            pipeline.stored(number, [], self.left_behind(number));
        }
        Ok(if commits { Stored::WithCommit } else { Stored::Final })
    }

    /// Whether a chunk passes through a buffer in the step: it is on the volume, or is committed.
    fn has_buffer(&self, pipeline: &Pipeline, number: usize) -> bool {
        self.chunks.record(number).is_some()
            && (pipeline.commits() || !self.chunks.is_in_ram(number))
    }

    /// What a commit lacks of a chunk after a step without one.
    fn left_behind(&self, number: usize) -> Behind {
        Behind {
            weight: self.chunks.weight_record(number).is_some(),
            state: self.chunks.is_in_ram(number) && self.chunks.record(number).is_some(),
        }
    }

    fn write(&self, number: usize, tensor: &AdamTensor, chunk: Chunk) -> Result<()> {
        let mut pipeline = self.pipeline();
        let step = pipeline.step();
        let is_behind =
            if pipeline.commits() { Behind::default() } else { self.left_behind(number) };
        let (mut state, weight) = pipeline.take_given(number)?;
        drop(pipeline);
        if let Some(offset) = self.chunks.ram_offset(number) {
            let nbytes = self.chunks.state_nbytes(number);
            state.as_mut_slice()[..nbytes].copy_from_slice(self.ram_slice(offset, nbytes));
        }
        let record = self.chunks.record(number).unwrap_or_else(|| unreachable!("it has a buffer"));
        let state = self.volume.write(record, step, state)?;
        let weight = match (weight, self.chunks.weight_record(number)) {
            (Some(buffer), Some(record)) => {
                let weight = tensor.weight().part(chunk.range(tensor.param.numel()));
                let copy = weight.at(buffer.as_ptr().expose_provenance());
                // SAFETY: the engine has stepped this chunk on this thread, and nothing else uses
                // it before its store has returned; the buffer is this thread's alone, and has
                // room for the record.
                unsafe { weight.copy_to(copy) };
                Some(self.volume.write(record, step, buffer)?)
            }
            _ => None,
        };
        let mut pipeline = self.pipeline();
        pipeline.stored(number, std::iter::once(state).chain(weight), is_behind);
        self.pump(&mut pipeline)?;
        drop(pipeline);
        self.changed.notify_all();
        Ok(())
    }

    fn commit(&self) -> Result<()> {
        let committed = self.make_step();
        self.or_fail(committed)
    }

    fn make_step(&self) -> Result<()> {
        self.end_writes(&AtomicBool::new(false))?;
        let mut pipeline = self.pipeline();
        if !pipeline.is_any_written() && !self.counts_each_step {
            return Ok(());
        }
        let (step, commits) = (pipeline.step(), pipeline.commits());
        pipeline.spare.clear();
        drop(pipeline);
        if commits {
            self.make_commit(step)?;
        }
        self.pipeline().ended();
        Ok(())
    }

    /// The state of a chunk in host memory.
    fn ram_slice(&self, offset: usize, nbytes: usize) -> &[u8] {
        assert!(offset + nbytes <= self.ram.nbytes());
        // SAFETY: within the buffer, initialised and mapped as long as it. The caller is the worker
        // that has stepped the chunk, or comes between steps: nothing writes it meanwhile.
        unsafe { std::slice::from_raw_parts(self.ram.as_ptr().add(offset), nbytes) }
    }
}

/// The tier of an engine: a swap for some of its tensors, memory for the others.
#[derive(Clone, Debug)]
pub struct Placed {
    swap: Arc<Swap>,
    /// For each tensor of the engine, which of the swap's it is.
    of: Box<[Option<usize>]>,
}

impl Placed {
    /// One in which tensor `i` of the engine is tensor `of[i]` of the swap; None: its state is in
    /// the tensor itself.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor that the swap does not have, or has been given twice.
    pub fn new(swap: Arc<Swap>, of: &[Option<usize>]) -> Result<Self> {
        let mut is_named = vec![false; swap.chunks.tensors().len()];
        for &tensor in of.iter().flatten() {
            let is_new =
                is_named.get_mut(tensor).is_some_and(|named| !std::mem::replace(named, true));
            if !is_new {
                return Err(Error::value(format!(
                    "tensor `{tensor}` of a swap, expected one of its {}, each once",
                    is_named.len()
                )));
            }
        }
        Ok(Self { swap, of: of.into() })
    }

    fn held(&self, tensor: usize) -> Option<&Held> {
        let number = self.of.get(tensor).copied().flatten()?;
        self.swap.chunks.tensors().get(number)
    }
}

// SAFETY: a chunk's route is the chunk of the tensor itself, whose memory the submit's caller
// lends; or its own range of the swap's host memory; or its own buffer, which the swap holds from
// the fetch to the store (SWAP-2).
unsafe impl Tier for Placed {
    fn begin(&self, runs: &mut dyn Iterator<Item = Planned<'_>>) -> Result<()> {
        self.swap.begin(&mut runs.filter_map(|run| {
            let tensor = self.of.get(run.tensor).copied().flatten()?;
            Some(Planned { tensor, ..run })
        }))
    }

    fn fetch(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<AdamTensor<Route>> {
        match self.held(chunk.tensor) {
            None => Ok(in_place(&tensor.chunk(chunk.index))),
            Some(held) => self.swap.fetch(held, tensor, chunk),
        }
    }

    fn store(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<Stored> {
        match self.held(chunk.tensor) {
            None => Ok(Stored::Final),
            Some(held) => self.swap.store(held, tensor, chunk),
        }
    }

    fn is_at_home(&self, tensor: usize) -> bool {
        self.held(tensor).is_none()
    }

    fn commit(&self) -> Result<()> {
        self.swap.commit()
    }
}
