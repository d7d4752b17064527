//! The kernels of a GPU: their texts, what they take, and their launches.
//!
//! The first parameter of a launch is a table of what it is to work on: so one launch does for many
//! parameters of a model. Tables and other parameters are as the texts have them.

use std::ffi::{CStr, c_void};

use cudarc::driver::{result, sys};

use super::{
    CHECKSUM_RUN, CHECKSUM_SUMS, Channels, Piece,
    driver::{Handle, failed},
};
use crate::{
    adam::{Step, selected::WeightKind},
    error::Result,
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
pub(super) struct Checksums {
    module: Module,
    function: Handle<sys::CUfunction>,
}

impl Checksums {
    /// Compiles it, in the current context.
    pub(super) fn load() -> Result<Self> {
        let module = Module::load(CHECKSUMS_PTX, "the kernel of checksums")?;
        Ok(Self { module, function: module.function(c"checksums")? })
    }

    /// What the driver has compiled.
    pub(super) fn module(&self) -> Handle<sys::CUmodule> {
        self.module.0
    }

    /// Writes the checksums of memory to `sums`, one after the other.
    ///
    /// # Safety
    /// As [`super::Device::checksums`]; the stream is alive.
    pub(super) unsafe fn launch(
        &self,
        memory: &[Piece],
        mut sums: u64,
        stream: sys::CUstream,
    ) -> Result<()> {
        for memory in memory.chunks(CHECKSUMS_PER_LAUNCH) {
            let mut pieces = [Piece::default(); CHECKSUMS_PER_LAUNCH];
            pieces[..memory.len()].copy_from_slice(memory);
            let mut params = [param(&mut pieces), param(&mut sums)];
            let grid = (CHECKSUM_SUMS as u32, memory.len() as u32, 1);
            // SAFETY: these are the parameters of `checksums` in `checksums.ptx`, in its order, and
            // its grid; the rest is passed on from the caller.
            unsafe {
                result::launch_kernel(
                    self.function.0,
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
}

/// The kernels of `channels.ptx`.
pub(super) struct Kernels {
    module: Module,
    step_channels: Handle<sys::CUfunction>,
    step_whole: Handle<sys::CUfunction>,
    restore_weights: Handle<sys::CUfunction>,
}

impl Kernels {
    /// Compiles them, in the current context.
    pub(super) fn load() -> Result<Self> {
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

    /// What the driver has compiled.
    pub(super) fn module(&self) -> Handle<sys::CUmodule> {
        self.module.0
    }

    /// Steps selected channels of blocks with their gradients.
    ///
    /// # Safety
    /// As [`super::Device::step_channels`]; the stream is alive.
    pub(super) unsafe fn step_channels(
        &self,
        blocks: &[(Channels, u64)],
        step: &Step,
        stream: sys::CUstream,
    ) -> Result<()> {
        let (whole, parts): (Vec<_>, Vec<_>) =
            blocks.iter().partition(|(channels, grad)| is_whole(channels, *grad));
        let mut scalars = Scalars::of(step);
        for blocks in whole.chunks(WHOLE_PER_LAUNCH) {
            // SAFETY: passed on from the caller.
            unsafe { self.launch_whole(blocks, &mut scalars, stream)? };
        }
        for blocks in parts.chunks(BLOCKS_PER_LAUNCH) {
            // SAFETY: passed on from the caller.
            unsafe { self.launch_parts(blocks, &mut scalars, stream)? };
        }
        Ok(())
    }

    /// Writes the weights of selected channels from their masters.
    ///
    /// # Safety
    /// As [`super::Device::restore_weights`]; the stream is alive.
    pub(super) unsafe fn restore_weights(
        &self,
        channels: &Channels,
        stream: sys::CUstream,
    ) -> Result<()> {
        let (mut weight, mut state) = (channels.weight, channels.state);
        let mut shape = shape_params(channels);
        let first = [param(&mut weight), param(&mut state)];
        let mut params: Vec<_> = first.into_iter().chain(shape.iter_mut().map(param)).collect();
        let blocks = blocks_for(channels.shape.numel());
        // SAFETY: these are the parameters of `restore_weights` in `channels.ptx`, in its order;
        // the rest is passed on from the caller.
        unsafe { Self::launch(self.restore_weights, (blocks, 1), stream, &mut params) }
    }

    /// Steps blocks with their gradients that [`is_whole`] says are, as many as a launch takes.
    ///
    /// # Safety
    /// As [`Kernels::step_channels`].
    unsafe fn launch_whole(
        &self,
        blocks: &[(Channels, u64)],
        scalars: &mut Scalars,
        stream: sys::CUstream,
    ) -> Result<()> {
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
        let mut params = scalars.behind([param(&mut table), param(&mut count)]);
        // SAFETY: these are the parameters of `step_whole` in `channels.ptx`, in its order; the
        // rest is passed on from the caller.
        unsafe { Self::launch(self.step_whole, (tiles, 1), stream, &mut params) }
    }

    /// Steps any blocks with their gradients, as many as a launch takes.
    ///
    /// # Safety
    /// As [`Kernels::step_channels`].
    unsafe fn launch_parts(
        &self,
        blocks: &[(Channels, u64)],
        scalars: &mut Scalars,
        stream: sys::CUstream,
    ) -> Result<()> {
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
        let mut params = scalars.behind([param(&mut table)]);
        let numel_max = blocks.iter().map(|(channels, _)| channels.shape.numel()).max();
        let grid = (blocks_for(numel_max.unwrap_or(0)), blocks.len() as u32);
        // SAFETY: these are the parameters of `step_channels` in `channels.ptx`, in its order; the
        // rest is passed on from the caller.
        unsafe { Self::launch(self.step_channels, grid, stream, &mut params) }
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

/// What both kernels of a step take behind their tables.
struct Scalars {
    has_l2: u32,
    values: [f32; 10],
}

impl Scalars {
    fn of(step: &Step) -> Self {
        Self { has_l2: u32::from(step.has_l2), values: step.scalars() }
    }

    /// The parameters of a kernel: `first`, and these.
    fn behind<const N: usize>(&mut self, first: [*mut c_void; N]) -> Vec<*mut c_void> {
        let own = [param(&mut self.has_l2)].into_iter().chain(self.values.iter_mut().map(param));
        first.into_iter().chain(own).collect()
    }
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
    // A block lies within a segment, or is a parameter of as many elements as
    // `rust/python/device_steps.rs` allows: all of these fit.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adam::selected::Shape;

    const ALL: Shape = Shape { rows: 3, row_len: 8, count: 3, by_columns: false };

    fn is_whole_at(shape: Shape, kind: WeightKind, [weight, grad, state]: [u64; 3]) -> bool {
        is_whole(&Channels { shape, kind, weight, state, follows_weight: true }, grad)
    }

    #[test]
    fn parameters_are_in_the_order_of_the_text() {
        let mut scalars = Scalars { has_l2: 1, values: std::array::from_fn(|at| at as f32) };
        let mut first = 7_u32;
        let params = scalars.behind([param(&mut first)]);
        // SAFETY: each is the address of a value of this type, which is alive and not written.
        let whole = |at: usize| unsafe { *params[at].cast::<u32>() };
        // SAFETY: as above.
        let found = params[2..].iter().map(|&at| unsafe { *at.cast::<f32>() }).collect::<Vec<_>>();
        assert_eq!((whole(0), whole(1), params.len()), (7, 1, 12));
        assert_eq!(found, (0..10).map(|at| at as f32).collect::<Vec<_>>());
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
