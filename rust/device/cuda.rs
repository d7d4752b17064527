//! A GPU through the CUDA driver, which is loaded at run time: nothing of CUDA is needed to build,
//! to import or to test.
//!
//! The lanes are streams of their own in the device's primary context, the one that torch uses;
//! they are not ordered with the legacy default stream, so that a copy waits for what
//! [`Device::order_lane_after`] says and for nothing else.
//!
//! A thread that enqueues on a stream whose queue is full blocks within the driver, which then may
//! let no other thread of the process enqueue anything on any stream. How much a queue holds is
//! nowhere said, so a thread that enqueues many copies sees to it that few are under way
//! (`offload/downloads.rs`).
//!
//! Its kernels are in `kernels.rs`. The driver compiles them for its GPU when they are first asked
//! for.
//!
//! A thread has a stack of contexts, of which the top is current. Attaching pushes the device's and
//! detaching pops it, so the context that another library has made current is that again.

use std::{
    ffi::c_int,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use cudarc::driver::{
    result::{self, stream::StreamKind},
    sys,
};

use super::{
    Attached, Behind, Channels, Device, Lane, Mark, Piece, Stream,
    driver::{self, Handle, failed},
    kernels::{Checksums, Kernels},
};
use crate::{
    adam::Step,
    error::{Error, Result},
};

/// See the [module](self).
pub struct CudaDevice {
    device: sys::CUdevice,
    context: Handle<sys::CUcontext>,
    /// One per [`Lane`].
    lanes: Vec<Handle<sys::CUstream>>,
    events: Vec<Handle<sys::CUevent>>,
    marks: Mutex<Marks>,
    kernels: OnceLock<Kernels>,
    checksums: OnceLock<Checksums>,
}

/// Events for points of callers' streams: as many as were ever outstanding at once.
#[derive(Default)]
struct Marks {
    events: Vec<Handle<sys::CUevent>>,
    /// Those that stand for no [`Mark`].
    free: Vec<usize>,
}

impl CudaDevice {
    /// The GPU that CUDA numbers `ordinal` in this process.
    ///
    /// # Errors
    /// [`Error::Os`] where there is no driver or no such GPU.
    pub fn new(ordinal: c_int, events: usize) -> Result<Self> {
        driver::load()?;
        let device = result::device::get(ordinal).map_err(failed("find the device"))?;
        // SAFETY: `device` was given out by the driver; `drop` releases what is retained.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(failed("open the device"))?;
        // Dropped half-made, it releases what it has.
        let mut made = Self {
            device,
            context: Handle(context),
            lanes: Vec::with_capacity(2),
            events: Vec::with_capacity(events),
            marks: Mutex::default(),
            kernels: OnceLock::new(),
            checksums: OnceLock::new(),
        };
        made.fill(events)?;
        Ok(made)
    }

    fn fill(&mut self, events: usize) -> Result<()> {
        self.attach()?;
        let filled = self.fill_current(events);
        self.detach();
        filled
    }

    /// Makes streams and events in the current context.
    fn fill_current(&mut self, events: usize) -> Result<()> {
        for _ in [Lane::Download, Lane::Upload] {
            let stream = result::stream::create(StreamKind::NonBlocking);
            self.lanes.push(stream.map(Handle).map_err(failed("make a stream"))?);
        }
        for _ in 0..events {
            self.events.push(create_event()?);
        }
        Ok(())
    }

    fn lane(&self, lane: Lane) -> sys::CUstream {
        self.lanes[lane as usize].0
    }

    fn kernels(&self) -> Result<&Kernels> {
        self.kernels.get().ok_or_else(|| {
            Error::value("the device steps no channels yet, expected it to be prepared for them")
        })
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An event without a time, of the current context. [`result::event::create`] takes one flag only.
fn create_event() -> Result<Handle<sys::CUevent>> {
    // Waiting threads sleep: one of them may stand in the way of the thread that launches work.
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
        | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
    let mut event = std::mem::MaybeUninit::uninit();
    // SAFETY: the driver writes the event before it reports success.
    unsafe {
        sys::cuEventCreate(event.as_mut_ptr(), flags).result().map_err(failed("make an event"))?;
        Ok(Handle(event.assume_init()))
    }
}

// SAFETY: lanes are streams and events are events of CUDA, whose order is the one that the trait
// asks for (CUDA Driver API, "Stream Management" and "Event Management").
unsafe impl Device for CudaDevice {
    fn attach(&self) -> Result<()> {
        // SAFETY: the context is retained until `drop`.
        unsafe { sys::cuCtxPushCurrent_v2(self.context.0) }
            .result()
            .map_err(failed("use the device"))
    }

    fn detach(&self) {
        let mut popped = std::mem::MaybeUninit::uninit();
        // SAFETY: the driver writes one pointer, which nothing reads. It fails only where the
        // thread has no context, so none of ours.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(popped.as_mut_ptr()) };
    }

    unsafe fn copy(&self, lane: Lane, device: u64, host: *mut u8, nbytes: usize) -> Result<()> {
        let stream = self.lane(lane);
        // SAFETY: the caller vouches for both ranges until the copy is done; the stream lives as
        // long as `self`.
        let copied = unsafe {
            match lane {
                Lane::Download => sys::cuMemcpyDtoHAsync_v2(host.cast(), device, nbytes, stream),
                Lane::Upload => sys::cuMemcpyHtoDAsync_v2(device, host.cast(), nbytes, stream),
            }
        };
        copied.result().map_err(failed(if lane == Lane::Download {
            "copy to the host"
        } else {
            "copy to the device"
        }))
    }

    fn record(&self, lane: Lane, event: usize) -> Result<()> {
        // SAFETY: both live as long as `self`.
        unsafe { result::event::record(self.events[event].0, self.lane(lane)) }
            .map_err(failed("record an event"))
    }

    fn wait(&self, event: usize) -> Result<()> {
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.events[event].0) }.map_err(failed("copy"))
    }

    fn mark(&self, stream: Stream) -> Result<Mark> {
        let mut marks = self.marks();
        let number = match marks.free.pop() {
            Some(number) => number,
            None => {
                marks.events.push(create_event()?);
                marks.events.len() - 1
            }
        };
        let event = marks.events[number];
        // Not beneath the lock, which the thread that orders a lane takes.
        drop(marks);
        // SAFETY: the maker of the stream vouches that it is alive; the event lives as long as
        // `self`, and no other mark has it.
        unsafe {
            result::event::record(event.0, std::ptr::with_exposed_provenance_mut(stream.0 as usize))
        }
        .map_err(failed("mark a stream"))?;
        Ok(Mark(number))
    }

    fn order_lane_after(&self, lane: Lane, mark: Mark) -> Result<()> {
        let event = self.marks().events[mark.0];
        // SAFETY: both live as long as `self`.
        let ordered = unsafe { sys::cuStreamWaitEvent(self.lane(lane), event.0, 0) }.result();
        // The call has taken up what the event stood for, which may be recorded anew.
        self.marks().free.push(mark.0);
        ordered.map_err(failed("order a copy"))
    }

    fn order_stream_after(&self, stream: Stream, event: usize) -> Result<()> {
        // SAFETY: the maker of the stream vouches that it is alive; the event lives as long as
        // `self`.
        unsafe {
            sys::cuStreamWaitEvent(
                std::ptr::with_exposed_provenance_mut(stream.0 as usize),
                self.events[event].0,
                0,
            )
        }
        .result()
        .map_err(failed("order a stream"))
    }

    fn drain(&self) -> Result<()> {
        for lane in &self.lanes {
            // SAFETY: the stream lives as long as `self`.
            unsafe { result::stream::synchronize(lane.0) }.map_err(failed("copy"))?;
        }
        Ok(())
    }

    fn prepare_channels(&self) -> Result<()> {
        if self.kernels.get().is_none() {
            let _attached = Attached::to(self)?;
            let loaded = Kernels::load()?;
            // Of two threads that come at once, one wins; the other's is unloaded with the context.
            let _ = self.kernels.set(loaded);
        }
        Ok(())
    }

    unsafe fn step_channels(
        &self,
        stream: Stream,
        blocks: &[(Channels, u64)],
        step: &Step,
    ) -> Result<()> {
        let kernels = self.kernels()?;
        let stream = std::ptr::with_exposed_provenance_mut(stream.0 as usize);
        // SAFETY: passed on from the caller, and the maker of the stream vouches that it is alive.
        unsafe { kernels.step_channels(blocks, step, stream) }
    }

    unsafe fn restore_weights(&self, channels: &Channels) -> Result<()> {
        let kernels = self.kernels()?;
        // SAFETY: passed on from the caller; the stream lives as long as `self`.
        unsafe { kernels.restore_weights(channels, self.lane(Lane::Upload)) }
    }

    fn prepare_checksums(&self) -> Result<()> {
        if self.checksums.get().is_none() {
            let _attached = Attached::to(self)?;
            let loaded = Checksums::load()?;
            // As of `prepare_channels`.
            let _ = self.checksums.set(loaded);
        }
        Ok(())
    }

    unsafe fn checksums(&self, behind: Behind, memory: &[Piece], sums: u64) -> Result<()> {
        let kernel = self.checksums.get().ok_or_else(|| {
            Error::value("the device takes no checksums yet, expected it to be prepared for them")
        })?;
        let stream = match behind {
            Behind::Stream(stream) => std::ptr::with_exposed_provenance_mut(stream.0 as usize),
            Behind::Uploads => self.lane(Lane::Upload),
        };
        // SAFETY: passed on from the caller, and the maker of the stream vouches that it is alive.
        unsafe { kernel.launch(memory, sums, stream) }
    }

    unsafe fn pin(&self, address: usize, nbytes: usize) -> Result<()> {
        const PORTABLE: u32 = 1;
        let host = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller keeps the range alive until `unpin`.
        unsafe { sys::cuMemHostRegister_v2(host, nbytes, PORTABLE) }.result().map_err(failed(
            &format!("pin `{nbytes}` bytes of host memory (hint: see `ulimit -l`)"),
        ))
    }

    fn unpin(&self, address: usize) {
        // SAFETY: the range was pinned. Where that fails the context is gone, and the pin with it.
        let _ = unsafe { sys::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(address)) };
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let marks = self.marks.get_mut().unwrap_or_else(PoisonError::into_inner);
        let events = self.events.drain(..).chain(marks.events.drain(..)).collect::<Vec<_>>();
        let lanes = std::mem::take(&mut self.lanes);
        let kernels = self.kernels.take().map(|kernels| kernels.module());
        let checksums = self.checksums.take();
        let modules = kernels.into_iter().chain(checksums.map(|checksums| checksums.module()));
        if let Ok(_attached) = Attached::to(self) {
            // SAFETY: nothing else has them; each is destroyed once. Failures mean that the context
            // is gone already.
            unsafe {
                for event in events {
                    let _ = result::event::destroy(event.0);
                }
                for lane in lanes {
                    let _ = result::stream::destroy(lane.0);
                }
                for module in modules {
                    let _ = result::module::unload(module.0);
                }
            }
        }
        // SAFETY: retained once by `new`, and current on no thread through us any more.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
