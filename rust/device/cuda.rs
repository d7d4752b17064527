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
//! Selected channels are stepped by `channels.ptx`, which the driver compiles for its GPU when they
//! are first asked for.
//!
//! A thread has a stack of contexts, of which the top is current. Attaching pushes the device's and
//! detaching pops it, so the context that another library has made current is that again.

use std::{
    ffi::{CStr, c_int, c_void},
    panic::catch_unwind,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use cudarc::driver::{
    result::{self, DriverError, stream::StreamKind},
    sys,
};

use super::{Attached, CHECKSUM_RUN, CHECKSUM_SUMS, Channels, Device, Lane, Mark, Stream, Words};
use crate::{
    adam::{Step, selected::WeightKind},
    error::{Error, Result},
};

/// The kernels of selected channels, as the driver wants its text: with a 0 behind it.
const CHANNELS_PTX: &CStr = text(concat!(include_str!("channels.ptx"), "\0"));

/// The kernel of checksums, likewise.
const CHECKSUMS_PTX: &CStr = text(concat!(include_str!("checksums.ptx"), "\0"));

/// Places of its first parameter, which is 2 KiB.
const CHECKSUMS_PER_LAUNCH: usize = 128;

/// Places of the first parameter of `step_channels`, which is 3,840 bytes. With the others it is
/// less than the 4 KiB that a launch takes.
const BLOCKS_PER_LAUNCH: usize = 80;
/// Likewise of `step_whole`.
const WHOLE_PER_LAUNCH: usize = 96;
const _: () = assert!(BLOCKS_PER_LAUNCH * size_of::<Block>() == 3840);
const _: () = assert!(WHOLE_PER_LAUNCH * size_of::<Whole>() == 3840);

/// Elements that a block of threads of `step_whole` steps; the kernel has the number as well.
const WHOLE_TILE: usize = 1 << 12;

/// Elements that one of its threads takes at once, four times.
const WHOLE_LANES: usize = 4;
const _: () = assert!(4 * WHOLE_LANES * BLOCK_THREADS as usize == WHOLE_TILE);

const fn text(with_nul: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_nul.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a 0 ends the text, and nothing else"),
    }
}

/// Threads of a block of a kernel, and the most blocks: threads take several elements then.
const BLOCK_THREADS: u32 = 256;
const BLOCKS_MAX: u32 = 1 << 14;

/// See the [module](self).
pub struct CudaDevice {
    device: sys::CUdevice,
    context: Handle<sys::CUcontext>,
    /// One per [`Lane`].
    lanes: Vec<Handle<sys::CUstream>>,
    events: Vec<Handle<sys::CUevent>>,
    marks: Mutex<Marks>,
    kernels: OnceLock<Kernels>,
    checksums: Mutex<Option<Checksums>>,
}

/// The kernels of a text, compiled.
#[derive(Clone, Copy)]
struct Module(Handle<sys::CUmodule>);

impl Module {
    /// Compiles `text`, in the current context; `what` they are, for errors.
    fn load(text: &'static CStr, what: &str) -> Result<Self> {
        let compile = format!("compile {what}");
        // SAFETY: the text ends with a 0, and outlives the call.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
        module.map(|module| Self(Handle(module))).map_err(failed(&compile))
    }

    fn function(&self, name: &CStr) -> Result<Handle<sys::CUfunction>> {
        let find = format!("find the kernel `{}`", name.to_string_lossy());
        // SAFETY: the module was given out by the driver, and is loaded.
        let found = unsafe { result::module::get_function(self.0.0, name.to_owned()) };
        found.map(Handle).map_err(failed(&find))
    }
}

/// The kernel of `checksums.ptx`.
#[derive(Clone, Copy)]
struct Checksums {
    module: Module,
    function: Handle<sys::CUfunction>,
}

impl Checksums {
    /// Compiles it, in the current context.
    fn load() -> Result<Self> {
        let module = Module::load(CHECKSUMS_PTX, "the kernel of checksums")?;
        Ok(Self { module, function: module.function(c"checksums")? })
    }
}

/// The kernels of `channels.ptx`.
struct Kernels {
    module: Module,
    step_channels: Handle<sys::CUfunction>,
    step_whole: Handle<sys::CUfunction>,
    restore_weights: Handle<sys::CUfunction>,
}

impl Kernels {
    /// Compiles them, in the current context.
    fn load() -> Result<Self> {
        let module = Module::load(CHANNELS_PTX, "the kernels of selected channels")?;
        let [step_channels, step_whole, restore_weights] =
            [c"step_channels", c"step_whole", c"restore_weights"].map(|name| module.function(name));
        Ok(Self {
            module,
            step_channels: step_channels?,
            step_whole: step_whole?,
            restore_weights: restore_weights?,
        })
    }

    /// Steps blocks with their gradients that [`is_whole`] says are.
    ///
    /// # Safety
    /// As [`Device::step_channels`]; the stream is alive.
    unsafe fn step_whole(
        &self,
        blocks: &[(Channels, u64)],
        step: &Step,
        stream: sys::CUstream,
    ) -> Result<()> {
        let mut has_l2 = u32::from(step.has_l2);
        let mut scalars = step.scalars();
        for blocks in blocks.chunks(WHOLE_PER_LAUNCH) {
            let mut table = [Whole::default(); WHOLE_PER_LAUNCH];
            let mut tiles = 0;
            for (place, &(channels, grad)) in table.iter_mut().zip(blocks) {
                let numel = channels.shape.numel();
                *place = Whole {
                    weight: channels.weight,
                    grad,
                    state: channels.state,
                    numel: numel as u32,
                    kind: kind_param(channels.kind),
                    follows_weight: u32::from(channels.follows_weight),
                    first_tile: tiles,
                };
                tiles += numel.div_ceil(WHOLE_TILE) as u32;
            }
            let mut count = blocks.len() as u32;
            let mut params = [std::ptr::null_mut(); 13];
            let of_step = [param(&mut table), param(&mut count), param(&mut has_l2)]
                .into_iter()
                .chain(scalars.iter_mut().map(param));
            params.iter_mut().zip(of_step).for_each(|(place, value)| *place = value);
            // SAFETY: these are the parameters of `step_whole` in `channels.ptx`, in its order; the
            // rest is passed on from the caller.
            unsafe { Self::launch(self.step_whole, (tiles, 1), stream, &mut params)? };
        }
        Ok(())
    }

    /// Steps any blocks with their gradients.
    ///
    /// # Safety
    /// As [`Device::step_channels`]; the stream is alive.
    unsafe fn step_parts(
        &self,
        blocks: &[(Channels, u64)],
        step: &Step,
        stream: sys::CUstream,
    ) -> Result<()> {
        let mut has_l2 = u32::from(step.has_l2);
        let mut scalars = step.scalars();
        for blocks in blocks.chunks(BLOCKS_PER_LAUNCH) {
            let mut table = [Block::default(); BLOCKS_PER_LAUNCH];
            for (place, &(channels, grad)) in table.iter_mut().zip(blocks) {
                *place = Block {
                    weight: channels.weight,
                    grad,
                    state: channels.state,
                    shape: shape_params(&channels),
                    follows_weight: u32::from(channels.follows_weight),
                };
            }
            let mut params = [std::ptr::null_mut(); 12];
            let of_step = [param(&mut table), param(&mut has_l2)]
                .into_iter()
                .chain(scalars.iter_mut().map(param));
            params.iter_mut().zip(of_step).for_each(|(place, value)| *place = value);
            let numel_max = blocks.iter().map(|(channels, _)| channels.shape.numel()).max();
            let grid = (blocks_for(numel_max.unwrap_or(0)), blocks.len() as u32);
            // SAFETY: these are the parameters of `step_channels` in `channels.ptx`, in its order;
            // the rest is passed on from the caller.
            unsafe { Self::launch(self.step_channels, grid, stream, &mut params)? };
        }
        Ok(())
    }

    /// Launches one with these parameters, on a grid of blocks of threads.
    ///
    /// # Safety
    /// The parameters are those of the kernel, and what they name is as it wants it until it has
    /// ended.
    unsafe fn launch(
        function: Handle<sys::CUfunction>,
        (width, height): (u32, u32),
        stream: sys::CUstream,
        params: &mut [*mut c_void],
    ) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        // SAFETY: passed on from the caller.
        unsafe {
            result::launch_kernel(
                function.0,
                (width, height, 1),
                (BLOCK_THREADS, 1, 1),
                0,
                stream,
                params,
            )
        }
        .map_err(failed("launch a kernel of selected channels"))
    }
}

/// How many blocks of threads take `numel` elements one at a time.
fn blocks_for(numel: usize) -> u32 {
    (numel as u32).div_ceil(BLOCK_THREADS).min(BLOCKS_MAX)
}

/// A parameter of a kernel, by its address.
fn param<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

/// What `step_channels` of `channels.ptx` takes of a block.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Block {
    weight: u64,
    grad: u64,
    state: u64,
    shape: [u32; 5],
    follows_weight: u32,
}

/// What `step_whole` of `channels.ptx` takes of a block.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Whole {
    weight: u64,
    grad: u64,
    state: u64,
    numel: u32,
    kind: u32,
    follows_weight: u32,
    first_tile: u32,
}

/// Whether `step_whole` takes a block with this gradient: all its rows are selected. Their indices
/// are ascending, so its state has the order of its elements.
fn is_whole(channels: &Channels, grad: u64) -> bool {
    let Channels { shape, kind, weight, state, .. } = channels;
    let nbytes = (WHOLE_LANES * kind.dtype().size()) as u64;
    shape.count == shape.rows
        && !shape.by_columns
        && shape.numel().is_multiple_of(WHOLE_LANES)
        && state.is_multiple_of((WHOLE_LANES * size_of::<f32>()) as u64)
        && weight.is_multiple_of(nbytes)
        && grad.is_multiple_of(nbytes)
}

/// What the kernels take of the shape: elements, those of a part of one row, those of a row, the
/// axis, and how a master becomes a weight.
fn shape_params(channels: &Channels) -> [u32; 5] {
    let Channels { shape, kind, .. } = channels;
    // A block lies within a segment, or has as many elements as `rust/python/device_steps.rs` lets a
    // parameter have: all of these fit.
    [
        shape.numel() as u32,
        shape.inner() as u32,
        shape.row_len as u32,
        u32::from(shape.by_columns),
        kind_param(*kind),
    ]
}

fn kind_param(kind: WeightKind) -> u32 {
    match kind {
        WeightKind::Float32 => 0,
        WeightKind::Split => 1,
        WeightKind::Float16 => 2,
        WeightKind::BFloat16 => 3,
    }
}

/// Events for points of callers' streams: as many as were ever outstanding at once.
#[derive(Default)]
struct Marks {
    events: Vec<Handle<sys::CUevent>>,
    /// Those that stand for no [`Mark`].
    free: Vec<usize>,
}

/// A pointer that the driver gave out.
#[derive(Clone, Copy)]
struct Handle<T>(T);

// SAFETY: the driver's objects may be used from any thread whose current context is theirs (CUDA
// Driver API, "Context management"), which `attach` sees to; an event is recorded by one thread at
// a time, as the trait asks, or under a lock.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

fn failed(what: &str) -> impl FnOnce(DriverError) -> Error + '_ {
    move |error| {
        let text = error
            .error_string()
            .map_or_else(|_| "unknown".into(), |text| text.to_string_lossy().into_owned());
        Error::os(
            format!("CUDA failed to {what}"),
            std::io::Error::other(format!("{text} ({:?})", error.0)),
        )
    }
}

/// Loads the driver, once.
fn driver() -> Result<()> {
    static DRIVER: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let loaded = DRIVER.get_or_init(|| {
        // SAFETY: loads the driver's library, whose constructors run in every CUDA program.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcuda.so.1 is not to be found".to_owned());
        }
        // The loader panics where a symbol is missing.
        match catch_unwind(result::init) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("the driver does not start: {error}")),
            Err(_) => Err("the driver is too old, expected CUDA 11.4 or later".to_owned()),
        }
    });
    loaded.clone().map_err(|what| {
        Error::os(
            "no CUDA; hint: see `nvidia-smi` and `stepwell doctor`",
            std::io::Error::other(what),
        )
    })
}

impl CudaDevice {
    /// The GPU that CUDA numbers `ordinal` in this process.
    ///
    /// # Errors
    /// [`Error::Os`] where there is no driver or no such GPU.
    pub fn new(ordinal: c_int, events: usize) -> Result<Self> {
        driver()?;
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
            checksums: Mutex::default(),
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

    fn loaded_checksums(&self) -> Result<Checksums> {
        let mut loaded = self.checksums.lock().unwrap_or_else(PoisonError::into_inner);
        match *loaded {
            Some(known) => Ok(known),
            None => Ok(*loaded.insert(Checksums::load()?)),
        }
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
        let (whole, parts): (Vec<_>, Vec<_>) =
            blocks.iter().partition(|(channels, grad)| is_whole(channels, *grad));
        // SAFETY: passed on from the caller, and the maker of the stream vouches that it is alive.
        unsafe {
            kernels.step_whole(&whole, step, stream)?;
            kernels.step_parts(&parts, step, stream)
        }
    }

    unsafe fn restore_weights(&self, channels: &Channels) -> Result<()> {
        let kernels = self.kernels()?;
        let (mut weight, mut state) = (channels.weight, channels.state);
        let mut shape = shape_params(channels);
        let mut params = [std::ptr::null_mut(); 7];
        let of_restore =
            [param(&mut weight), param(&mut state)].into_iter().chain(shape.iter_mut().map(param));
        params.iter_mut().zip(of_restore).for_each(|(place, value)| *place = value);
        let stream = self.lane(Lane::Upload);
        let blocks = blocks_for(channels.shape.numel());
        // SAFETY: these are the parameters of `restore_weights` in `channels.ptx`, in its order;
        // the caller vouches for the memory; the stream lives as long as `self`.
        unsafe { Kernels::launch(kernels.restore_weights, (blocks, 1), stream, &mut params) }
    }

    unsafe fn checksums(&self, stream: Stream, memory: &[Words], sums: u64) -> Result<()> {
        let Checksums { function, .. } = self.loaded_checksums()?;
        let stream = std::ptr::with_exposed_provenance_mut(stream.0 as usize);
        let mut sums = sums;
        for memory in memory.chunks(CHECKSUMS_PER_LAUNCH) {
            let mut pieces = [Words::default(); CHECKSUMS_PER_LAUNCH];
            pieces[..memory.len()].copy_from_slice(memory);
            let mut params = [param(&mut pieces), param(&mut sums)];
            let grid = (CHECKSUM_SUMS as u32, memory.len() as u32, 1);
            // SAFETY: these are the parameters of `checksums` in `checksums.ptx`, in its order, and
            // its grid; the caller vouches for the memory, and the maker of the stream that it is
            // alive.
            unsafe {
                result::launch_kernel(
                    function.0,
                    grid,
                    (CHECKSUM_RUN as u32, 1, 1),
                    0,
                    stream,
                    &mut params,
                )
            }
            .map_err(failed("launch the kernel of checksums"))?;
            sums += (memory.len() * CHECKSUM_SUMS * size_of::<u64>()) as u64;
        }
        Ok(())
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
        let kernels = self.kernels.take().map(|kernels| kernels.module);
        let checksums = self.checksums.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let modules = kernels.into_iter().chain(checksums.map(|checksums| checksums.module));
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
                    let _ = result::module::unload(module.0.0);
                }
            }
        }
        // SAFETY: retained once by `new`, and current on no thread through us any more.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adam::selected::Shape;

    const ALL: Shape = Shape { rows: 3, row_len: 8, count: 3, by_columns: false };

    fn is_whole_at(shape: Shape, kind: WeightKind, [weight, grad, state]: [u64; 3]) -> bool {
        is_whole(&Channels { shape, kind, weight, state, follows_weight: true }, grad)
    }

    #[test]
    fn four_elements_at_once_are_taken_of_what_is_selected_as_a_whole() {
        for (kind, aligned) in [(WeightKind::Float32, 16), (WeightKind::Split, 8)] {
            assert!(is_whole_at(ALL, kind, [aligned, 3 * aligned, 16]));
        }
        for shape in [
            Shape { count: 2, ..ALL },
            Shape { by_columns: true, ..ALL },
            Shape { row_len: 7, ..ALL },
        ] {
            assert!(!is_whole_at(shape, WeightKind::Split, [16, 16, 16]), "{shape:?}");
        }
    }

    #[test]
    fn none_are_where_any_memory_is_not_aligned_for_them() {
        for (kind, nbytes) in [(WeightKind::Float32, 4), (WeightKind::Float16, 2)] {
            for ahead in 1..4 {
                let off = 64 + ahead * nbytes;
                assert!(!is_whole_at(ALL, kind, [off, 64, 64]), "{kind:?}, {ahead}");
                assert!(!is_whole_at(ALL, kind, [64, off, 64]), "{kind:?}, {ahead}");
                assert!(!is_whole_at(ALL, kind, [64, 64, 64 + 4 * ahead]), "{kind:?}, {ahead}");
            }
        }
    }
}
