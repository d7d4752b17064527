//! The thread that runs a step in the background, and what callers wait for.

use std::{
    iter,
    ops::Range,
    process,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    downloads::{Download, Downloads, IN_FLIGHT},
    segment::Segments,
    thread::{caught, start},
};
use crate::{
    adam::{Hyper, Step, batch, revocable::HostSlots, tensor::AdamTensor},
    device::{Device, Lane, Stream},
    error::{Error, Result},
    isa::Isa,
    pool::Pool,
    state::chunk::Chunk,
    view::{View, check_disjoint},
};

/// One tensor of a step.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Which of the engine's tensors.
    pub index: usize,
    /// Its host side, with the gradient.
    pub tensor: AdamTensor,
    /// Where its new weight goes, in device memory.
    pub weight: u64,
    /// The number of this update, from 1.
    pub count: u64,
    /// What to step it with.
    pub hyper: Hyper,
}

/// What the last step took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// From the first chunk to the last.
    pub step: Duration,
    /// The part of it that the worker who waited longest has waited for gradients.
    pub gradients: Duration,
    /// Bytes that came down since the step before.
    pub bytes_downloaded: u64,
    /// Bytes that went up.
    pub bytes_uploaded: u64,
}

/// See the [module](super). Dropping it waits for the step that runs and for all copies.
pub struct Engine {
    shared: Arc<Shared>,
    coordinator: Option<JoinHandle<()>>,
    /// Hands over the downloads.
    issuer: Option<JoinHandle<()>>,
    /// Addresses of what is pinned.
    pinned: Mutex<Vec<usize>>,
    /// The process that has the threads.
    process: u32,
}

struct Shared {
    device: Arc<dyn Device>,
    pool: Pool,
    isa: Isa,
    segments: Segments,
    /// Where the state of each chunk is: at home, where uploads take the weights from.
    slots: HostSlots,
    downloads: Downloads,
    /// For each segment whose gradient was taken by itself since the last submit: that copy's ticket. 0 for the others.
    taken: Box<[AtomicU64]>,
    /// The ticket of `gradients_event` at the last submit.
    all_taken: AtomicU64,
    bytes_downloaded: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Submitted and not yet begun.
    job: Option<Vec<Update>>,
    /// From submit to the last chunk.
    busy: bool,
    /// For each segment: its upload of the last step is enqueued and its event recorded, or it had no part in that step.
    issued: Vec<bool>,
    failure: Option<String>,
    timing: Timing,
    quit: bool,
}

impl State {
    fn check_idle(&self) -> Result<()> {
        match &self.failure {
            Some(failure) => Err(broken(failure)),
            None if self.busy => Err(Error::value("a step is still running, expected it to be finished first")),
            None => Ok(()),
        }
    }
}

/// Numbers of the device's events: one per segment for its gradient, one for its weight, two, and those of the downloads.
impl Segments {
    fn events(&self) -> usize {
        self.download_events() + IN_FLIGHT
    }

    fn weight_event(&self, segment: usize) -> usize {
        self.count() + segment
    }

    /// All that was taken before a submit.
    fn gradients_event(&self) -> usize {
        2 * self.count()
    }

    /// All that was uploaded before a finish.
    fn weights_event(&self) -> usize {
        2 * self.count() + 1
    }

    /// The first of those that the downloads use as they like.
    fn download_events(&self) -> usize {
        2 * self.count() + 2
    }
}

impl Engine {
    /// An engine for tensors of these sizes, in forward order, whose weights are on `device` (see [`crate::device::open`]).
    ///
    /// # Errors
    /// As [`crate::device::open`]; [`Error::Os`] where a thread cannot be started.
    pub fn new(device: &str, numels: &[usize], pool: Pool, isa: Isa) -> Result<Self> {
        Self::on(crate::device::open(device, Self::events(numels))?, numels, pool, isa)
    }

    /// How many events the device of an engine for such tensors has room for.
    #[must_use]
    pub fn events(numels: &[usize]) -> usize {
        Segments::new(numels).events()
    }

    /// As [`Engine::new`], on a device that is open, with room for [`Engine::events`].
    ///
    /// # Errors
    /// [`Error::Os`] where a thread cannot be started.
    pub fn on(device: Arc<dyn Device>, numels: &[usize], pool: Pool, isa: Isa) -> Result<Self> {
        let segments = Segments::new(numels);
        let shared = Arc::new(Shared {
            downloads: Downloads::new(Arc::clone(&device), segments.download_events()),
            device,
            pool,
            isa,
            taken: (0..segments.count()).map(|_| AtomicU64::new(0)).collect(),
            all_taken: AtomicU64::new(0),
            bytes_downloaded: AtomicU64::new(0),
            state: Mutex::new(State { issued: vec![true; segments.count()], ..State::default() }),
            changed: Condvar::new(),
            slots: HostSlots::home(numels),
            segments,
        });
        let (coordinated, issued) = (Arc::clone(&shared), Arc::clone(&shared));
        // Dropped, it ends the threads that have been started.
        let mut engine =
            Self { shared, coordinator: None, issuer: None, pinned: Mutex::default(), process: process::id() };
        engine.coordinator = Some(start("stepwell-offload", move || coordinated.coordinate())?);
        engine.issuer = Some(start("stepwell-issuer", move || issued.downloads.hand_over())?);
        Ok(engine)
    }

    /// Copies whole gradients to the host: `(tensor, device address, host memory)` each, in this order, after what `stream` holds now. Waits for nothing.
    ///
    /// # Safety
    /// Both sides are alive; nobody writes the device side until it is released or drained, nor uses the host side until the step that takes it is
    /// submitted and done.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor that the engine does not have, or while a step is running; [`Error::Os`] where the device has failed, also in
    /// copies of calls before.
    pub unsafe fn take(&self, gradients: &[(usize, u64, View)], stream: Stream) -> Result<()> {
        let Shared { device, segments, downloads, taken, bytes_downloaded, .. } = &*self.shared;
        for (index, _, host) in gradients {
            self.shared.check_index(*index)?;
            host.expect("the gradient's host memory", &[host.dtype()], segments.numel(*index))?;
        }
        self.ready()?;
        let mark = device.mark(stream)?;
        let copies = gradients.iter().flat_map(|&(index, source, host)| {
            segments.of(index).map(move |segment| {
                let elements = segments.elements(index, segment);
                let (offset, nbytes) = (elements.start * host.dtype().size(), elements.len() * host.dtype().size());
                (segment, source + offset as u64, host.address() + offset, nbytes)
            })
        });
        let entries = copies.clone().map(|(segment, source, target, nbytes)| Download::Copy {
            source,
            target,
            nbytes,
            event: Some(segment),
        });
        // SAFETY: passed on from the caller; segments lie within both sides.
        let ticket = unsafe { downloads.push(iter::once(Download::After(mark)).chain(entries))? };
        for ((segment, _, _, nbytes), ticket) in copies.zip(ticket + 1..) {
            taken[segment].store(ticket, Ordering::Release);
            bytes_downloaded.fetch_add(nbytes as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies any device memory to the host, after what `stream` holds now. The next step begins when all of it is there.
    ///
    /// # Safety
    /// As [`Engine::take`].
    ///
    /// # Errors
    /// As [`Engine::take`].
    pub unsafe fn take_part(&self, parts: &[(u64, View)], stream: Stream) -> Result<()> {
        let Shared { device, downloads, bytes_downloaded, .. } = &*self.shared;
        self.ready()?;
        let mark = device.mark(stream)?;
        let nbytes = |host: View| host.numel() * host.dtype().size();
        let entries = parts.iter().map(|&(source, host)| Download::Copy {
            source,
            target: host.address(),
            nbytes: nbytes(host),
            event: None,
        });
        // SAFETY: passed on from the caller.
        unsafe { downloads.push(iter::once(Download::After(mark)).chain(entries))? };
        bytes_downloaded.fetch_add(parts.iter().map(|&(_, host)| nbytes(host) as u64).sum(), Ordering::Relaxed);
        Ok(())
    }

    /// Starts a step of these tensors, in this order, and returns. Weights are uploaded after what `stream` holds now. Gradients on the device may be written
    /// after [`Engine::release`].
    ///
    /// # Safety
    /// The memory of all views and weights is alive, and nobody else uses it, until the step is done; weights until they are waited for.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing changed, for what [`batch::step`] refuses, tensors that the engine does not have or has twice in a call, or while
    /// a step is running; [`Error::Os`] where the device has failed.
    pub unsafe fn submit(&self, updates: Vec<Update>, stream: Stream) -> Result<()> {
        let Shared { device, segments, downloads, all_taken, changed, .. } = &*self.shared;
        self.shared.check(&updates)?;
        self.ready()?;
        device.order_lane_after(Lane::Upload, device.mark(stream)?)?;
        let mut state = self.shared.lock();
        state.check_idle()?;
        // SAFETY: it is no copy.
        let ticket = unsafe { downloads.push([Download::Record(segments.gradients_event())])? };
        all_taken.store(ticket, Ordering::Release);
        for update in &updates {
            state.issued[segments.of(update.index)].fill(false);
        }
        state.job = Some(updates);
        state.busy = true;
        changed.notify_all();
        Ok(())
    }

    /// Waits on this thread, no longer than `timeout`, until the device has all copies of the gradients of the last submit; then `stream` waits for them: what
    /// is launched on it from now on may write them, and their memory may be freed to it. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where the device has failed.
    pub fn release(&self, stream: Stream, timeout: Duration) -> Result<bool> {
        let Shared { device, segments, downloads, all_taken, .. } = &*self.shared;
        self.check_process()?;
        if !downloads.wait_timeout(all_taken.load(Ordering::Acquire), timeout)? {
            return Ok(false);
        }
        device.attach()?;
        device.order_stream_after(stream, segments.gradients_event())?;
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout`, until the uploads of these elements of a tensor are enqueued; then `stream` waits for them.
    /// Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor or a range that the engine does not have; [`Error::Os`] where the step or the device has failed.
    pub fn wait(&self, index: usize, elements: &Range<usize>, stream: Stream, timeout: Duration) -> Result<bool> {
        let Shared { device, segments, .. } = &*self.shared;
        self.shared.check_index(index)?;
        if elements.start > elements.end || elements.end > segments.numel(index) {
            return Err(Error::value(format!(
                "elements `{}..{}` of a tensor of {}, expected a range within it",
                elements.start,
                elements.end,
                segments.numel(index)
            )));
        }
        self.check_process()?;
        let held = segments.holding(index, elements);
        if !self.shared.wait_while(timeout, |state| state.issued[held.clone()].contains(&false))? {
            return Ok(false);
        }
        device.attach()?;
        held.into_iter().try_for_each(|segment| device.order_stream_after(stream, segments.weight_event(segment)))?;
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout`, until the step is done on the host; then `stream` waits for all uploads. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Os`] where the step or the device has failed.
    pub fn finish(&self, stream: Stream, timeout: Duration) -> Result<bool> {
        let Shared { device, segments, .. } = &*self.shared;
        self.check_process()?;
        if !self.shared.wait_while(timeout, |state| state.busy)? {
            return Ok(false);
        }
        device.attach()?;
        device.record(Lane::Upload, segments.weights_event())?;
        device.order_stream_after(stream, segments.weights_event())?;
        Ok(true)
    }

    /// Waits until every copy that was taken or enqueued has ended. Not while a step runs.
    ///
    /// # Errors
    /// As [`Engine::finish`].
    pub fn drain(&self) -> Result<()> {
        let Shared { device, downloads, .. } = &*self.shared;
        self.idle()?;
        let issued = downloads.wait_for_all();
        // Also where a later one has failed.
        device.drain()?;
        issued
    }

    /// Whether a step is running on the host; in a forked child, none is.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        // No look at the lock in a child: a thread that is not there may hold it.
        self.process == process::id() && self.shared.lock().busy
    }

    /// What the last step took; in a forked child, nothing.
    #[must_use]
    pub fn timing(&self) -> Timing {
        if self.process == process::id() { self.shared.lock().timing } else { Timing::default() }
    }

    /// Workers that step.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.shared.pool.threads()
    }

    /// Pins host memory for the device, as long as the engine lives.
    ///
    /// # Safety
    /// The memory outlives the engine.
    ///
    /// # Errors
    /// [`Error::Os`] where the device refuses.
    pub unsafe fn pin(&self, address: usize, nbytes: usize) -> Result<()> {
        self.check_process()?;
        self.shared.device.attach()?;
        // SAFETY: passed on from the caller.
        unsafe { self.shared.device.pin(address, nbytes) }?;
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(address);
        Ok(())
    }

    /// Checks that no step is running and nothing has failed, and makes this thread one of the device's.
    fn ready(&self) -> Result<()> {
        self.idle()?;
        self.shared.downloads.check()
    }

    /// As [`Engine::ready`], but copies may have failed.
    fn idle(&self) -> Result<()> {
        self.check_process()?;
        self.shared.lock().check_idle()?;
        self.shared.device.attach()
    }

    fn check_process(&self) -> Result<()> {
        if self.process == process::id() {
            return Ok(());
        }
        Err(Error::value(format!(
            "the offload engine belongs to process `{}`, this is `{}`\nhint: make the optimizer after forking",
            self.process,
            process::id()
        )))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let (coordinator, issuer) = (self.coordinator.take(), self.issuer.take());
        if self.process != process::id() {
            // A forked child has neither the threads nor the device.
            std::mem::forget((coordinator, issuer, Arc::clone(&self.shared)));
            return;
        }
        self.shared.lock().quit = true;
        self.shared.changed.notify_all();
        if let Some(coordinator) = coordinator {
            // Its body catches panics.
            let _ = coordinator.join();
        }
        // Not earlier: the step waits for what is issued.
        self.shared.downloads.quit();
        if let Some(issuer) = issuer {
            let _ = issuer.join();
        }
        if self.shared.device.attach().is_ok() {
            // Whoever drops the engine may free the memory next. A failed device copies no more.
            let _ = self.shared.device.drain();
            for address in self.pinned.get_mut().unwrap_or_else(PoisonError::into_inner) {
                self.shared.device.unpin(*address);
            }
        }
    }
}

fn broken(failure: &str) -> Error {
    Error::os(
        "a step failed half-way, so parameters and state are not those of any step; hint: go on from a checkpoint",
        std::io::Error::other(failure),
    )
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `waiting` ended within `timeout`.
    fn wait_while(&self, timeout: Duration, mut waiting: impl FnMut(&State) -> bool) -> Result<bool> {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), timeout, |state| state.failure.is_none() && waiting(state))
            .unwrap_or_else(PoisonError::into_inner);
        match &state.failure {
            Some(failure) => Err(broken(failure)),
            None => Ok(!waiting(&state)),
        }
    }

    fn check_index(&self, index: usize) -> Result<()> {
        if index < self.segments.tensors() {
            return Ok(());
        }
        Err(Error::value(format!("tensor `{index}`, expected one of the engine's {}", self.segments.tensors())))
    }

    fn check(&self, updates: &[Update]) -> Result<()> {
        let mut seen = vec![false; self.segments.tensors()];
        for Update { index, tensor, hyper, .. } in updates {
            self.check_index(*index)?;
            if std::mem::replace(&mut seen[*index], true) {
                return Err(Error::value(format!("tensor `{index}` stands twice in a step, expected each once")));
            }
            if tensor.param.numel() != self.segments.numel(*index) {
                return Err(Error::value(format!(
                    "tensor `{index}` has `{}` elements, expected {}",
                    tensor.param.numel(),
                    self.segments.numel(*index)
                )));
            }
            hyper.validate()?;
        }
        let tensors: Vec<AdamTensor> = updates.iter().map(|update| update.tensor).collect();
        let counts: Vec<u64> = updates.iter().map(|update| update.count).collect();
        let grads = batch::grads_of(&tensors, &counts)?;
        check_disjoint(tensors.iter().flat_map(AdamTensor::written), grads.iter().map(|&grad| ("grad", grad)))
    }

    /// The coordinator's life.
    fn coordinate(&self) {
        loop {
            let idle = |state: &mut State| !state.quit && state.job.is_none();
            let mut state = self.changed.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(updates) = state.job.take() else { return };
            drop(state);
            let begin = Instant::now();
            let stepped = caught("a worker", || self.step(&updates));
            for taken in &self.taken {
                taken.store(0, Ordering::Relaxed);
            }
            let mut state = self.lock();
            match stepped {
                Ok((gradients, bytes_uploaded)) => {
                    let bytes_downloaded = self.bytes_downloaded.swap(0, Ordering::Relaxed);
                    state.timing = Timing { step: begin.elapsed(), gradients, bytes_downloaded, bytes_uploaded };
                }
                Err(error) => state.failure = Some(error.to_string()),
            }
            state.busy = false;
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Steps and uploads everything; returns how long a worker has waited for gradients, and the bytes that go up.
    fn step(&self, updates: &[Update]) -> Result<(Duration, u64)> {
        let Job { chunks, segments } = &Job::new(updates, &self.segments);
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let failure = Mutex::new(None);
        let longest_wait_ns = AtomicU64::new(0);
        let work = || -> Result<()> {
            self.device.attach()?;
            let mut waited = Duration::ZERO;
            while !failed.load(Ordering::Relaxed) {
                // In order, whoever comes: the next forward needs them in order.
                let Some(&(chunk, segment)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let segment = &segments[segment];
                let update = &updates[chunk.tensor];
                if !segment.is_ready.load(Ordering::Acquire) {
                    let begin = Instant::now();
                    self.wait_for_gradient(segment.number)?;
                    segment.is_ready.store(true, Ordering::Release);
                    waited += begin.elapsed();
                }
                let grad = update.tensor.grad.unwrap_or_else(|| unreachable!("checked by submit"));
                let state = self.slots.route(&update.tensor, Chunk { tensor: update.index, ..chunk });
                // SAFETY: submit's caller vouches for the memory; no other worker has this chunk, its gradient has arrived and nothing
                // reads its last weight any more.
                unsafe { batch::step_chunk(self.isa, &state, grad, &segment.step, chunk) };
                // Release hands this chunk's writes to whoever takes the last one, which acquires all of them.
                if segment.chunks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    self.upload(update, segment.number)?;
                }
            }
            longest_wait_ns.fetch_max(waited.as_nanos() as u64, Ordering::Relaxed);
            Ok(())
        };
        self.pool.run_on_each_worker(&|_| {
            if let Err(error) = work() {
                failed.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        let bytes = |update: &Update| (update.tensor.weight().numel() * update.tensor.weight().dtype().size()) as u64;
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok((Duration::from_nanos(longest_wait_ns.into_inner()), updates.iter().map(bytes).sum())),
        }
    }

    fn wait_for_gradient(&self, segment: usize) -> Result<()> {
        let (ticket, event) = match self.taken[segment].load(Ordering::Acquire) {
            0 => (self.all_taken.load(Ordering::Acquire), self.segments.gradients_event()),
            ticket => (ticket, segment),
        };
        // Until then the event stands for an older copy.
        self.downloads.wait(ticket)?;
        self.device.wait(event)?;
        // Its upload of the step before: long done, unless nobody has waited for it.
        self.device.wait(self.segments.weight_event(segment))
    }

    fn upload(&self, update: &Update, segment: usize) -> Result<()> {
        let weight = update.tensor.weight();
        let elements = self.segments.elements(update.index, segment);
        let (offset, nbytes) = (elements.start * weight.dtype().size(), elements.len() * weight.dtype().size());
        let from = std::ptr::with_exposed_provenance_mut::<u8>(weight.address() + offset);
        // SAFETY: submit's caller vouches for both sides; the segment lies within them and its chunks are stepped.
        unsafe { self.device.copy(Lane::Upload, update.weight + offset as u64, from, nbytes)? };
        self.device.record(Lane::Upload, self.segments.weight_event(segment))?;
        self.lock().issued[segment] = true;
        self.changed.notify_all();
        Ok(())
    }
}

/// A segment of the step that runs.
struct RunningSegment {
    number: usize,
    step: Step,
    chunks_left: AtomicUsize,
    /// Its gradient has arrived, and its last upload has ended.
    is_ready: AtomicBool,
}

/// All chunks of a step in order, each with its segment's place in `segments`.
struct Job {
    chunks: Vec<(Chunk, usize)>,
    segments: Vec<RunningSegment>,
}

impl Job {
    fn new(updates: &[Update], all: &Segments) -> Self {
        let mut job = Self { chunks: Vec::new(), segments: Vec::new() };
        for (tensor, update) in updates.iter().enumerate() {
            let step = Step::new(&update.hyper, update.count);
            for number in all.of(update.index) {
                let chunks = all.chunks(update.index, number);
                let place = job.segments.len();
                let (chunks_left, is_ready) = (AtomicUsize::new(chunks.len()), AtomicBool::new(false));
                job.segments.push(RunningSegment { number, step, chunks_left, is_ready });
                job.chunks.extend(chunks.map(|index| (Chunk { tensor, index }, place)));
            }
        }
        job
    }
}
