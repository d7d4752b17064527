//! What callers have of an engine: they hand over gradients and steps, and wait.

use std::{iter, ops::Range, process, time::Duration};

use super::{
    downloads::{Download, Downloads},
    segment::Segments,
    step::{Shared, State, Timing, Update},
    thread::start,
};
use crate::{
    device::{Device, Lane, Stream},
    error::{Error, Result},
    host::pool::Pool,
    simd::isa::Isa,
    stream::view::View,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        thread::JoinHandle,
    },
    tier::revocable::HostSlots,
};

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

impl Engine {
    /// An engine for tensors of these sizes, in forward order, whose weights are on `device` (see
    /// [`crate::device::open`]).
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
        let mut engine = Self {
            shared,
            coordinator: None,
            issuer: None,
            pinned: Mutex::default(),
            process: process::id(),
        };
        engine.coordinator = Some(start("stepwell-offload", move || coordinated.coordinate())?);
        engine.issuer = Some(start("stepwell-issuer", move || issued.downloads.hand_over())?);
        Ok(engine)
    }

    /// Copies whole gradients to the host: `(tensor, device address, host memory)` each, in this
    /// order, after what `stream` holds now. Waits for nothing.
    ///
    /// # Safety
    /// Both sides are alive; nobody writes the device side until it is released or drained, nor
    /// uses the host side until the step that takes it is submitted and done.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor that the engine does not have, or while a step is running;
    /// [`Error::Os`] where the device has failed, also in copies of calls before.
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
                let (offset, nbytes) =
                    (elements.start * host.dtype().size(), elements.len() * host.dtype().size());
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

    /// Copies any device memory to the host, after what `stream` holds now. The next step begins
    /// when all of it is there.
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
        bytes_downloaded
            .fetch_add(parts.iter().map(|&(_, host)| nbytes(host) as u64).sum(), Ordering::Relaxed);
        Ok(())
    }

    /// Starts a step of these tensors, in this order, and returns. Weights are uploaded after what
    /// `stream` holds now. Gradients on the device may be written after [`Engine::release`].
    ///
    /// # Safety
    /// The memory of all views and weights is alive, and nobody else uses it, until the step is
    /// done; weights until they are waited for.
    ///
    /// # Errors
    /// [`Error::Value`], with nothing changed, for what [`crate::adam::batch::step`] refuses,
    /// tensors that the engine does not have or has twice in a call, or while a step is running;
    /// [`Error::Os`] where the device has failed.
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

    /// Waits on this thread, no longer than `timeout`, until the device has all copies of the
    /// gradients of the last submit; then `stream` waits for them: what is launched on it from now
    /// on may write them, and their memory may be freed to it. Whether that was reached.
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

    /// Waits on this thread, no longer than `timeout`, until the uploads of these elements of a
    /// tensor are enqueued; then `stream` waits for them. Whether that was reached.
    ///
    /// # Errors
    /// [`Error::Value`] for a tensor or a range that the engine does not have; [`Error::Os`] where
    /// the step or the device has failed.
    pub fn wait(
        &self,
        index: usize,
        elements: &Range<usize>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<bool> {
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
        held.into_iter().try_for_each(|segment| {
            device.order_stream_after(stream, segments.weight_event(segment))
        })?;
        Ok(true)
    }

    /// Waits on this thread, no longer than `timeout`, until the step is done on the host; then
    /// `stream` waits for all uploads. Whether that was reached.
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

    /// Checks that no step is running and nothing has failed, and makes this thread one of the
    /// device's.
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
