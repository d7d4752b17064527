//! A device beside host memory: copies that run by themselves, in order, on two lanes, and events
//! that tell how far they are.
//!
//! - DEV-1 Copies of a lane run in the order in which they were enqueued; the two lanes run
//!   independently of each other and of the caller.
//! - DEV-2 An event is done when everything enqueued on its lane before it was last recorded is
//!   done. One that was never recorded is done.
//! - DEV-3 A lane ordered after a mark starts nothing later before what the stream held when it was
//!   marked is done. A stream ordered after an event starts nothing later before the event, as it
//!   was last recorded, is done.
//! - DEV-4 Enqueuing on a lane may block for as long as the lane is full, that is until copies end.
//!   Marking a stream takes nothing of a lane.
//!
//! - DEV-5 Selected channels are stepped and restored with the bits of [`crate::adam::selected`]
//!   (but for the payload of a NaN), in the order of the stream or lane that they are launched on.
//!
//! [`cuda`] is a GPU. [`host`] is this machine itself: its "device memory" is host memory too, and
//! its lanes are threads, so copies really are late there, and what does not wait for them shows on
//! a machine without a GPU. Nothing above this module knows which of the two it has.

pub mod cuda;
mod driver;
pub mod host;
mod kernels;

use std::{marker::PhantomData, sync::Arc};

use crate::{
    adam::{
        Step,
        selected::{Shape, WeightKind},
    },
    error::{Error, Result},
};

/// How many sums a checksum has.
pub const CHECKSUM_SUMS: usize = 256;

/// How many words that follow one another are of one sum.
const CHECKSUM_RUN: usize = 256;

/// What the word at `place` adds to a checksum. The multipliers are those of splitmix64 (G. Steele,
/// D. Lea and C. Flood, 2014, "Fast splittable pseudorandom number generators").
#[must_use]
pub fn mixed(word: u64, place: u64) -> u64 {
    let x = (word ^ place.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 32)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 32)
}

/// A queue of copies in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// From the device to host memory.
    Download,
    /// From host memory to the device.
    Upload,
}

/// A stream of the caller's, as its framework names it: a `CUstream`, 0 for the default one. Of the
/// host device the calling thread is the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// The default stream, which every device has.
    pub const DEFAULT: Self = Self(0);

    /// The stream with this handle.
    ///
    /// # Safety
    /// The handle is of a stream of the device that it is used with, and the stream is alive
    /// whenever it is used.
    #[must_use]
    pub unsafe fn new(handle: u64) -> Self {
        Self(handle)
    }
}

/// What a stream held at some moment, until a lane is ordered after it.
#[derive(Debug)]
pub struct Mark(usize);

/// Memory on a device.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Piece {
    /// Where it begins; 0 where it has no bytes.
    pub address: u64,
    /// How many bytes it has.
    pub nbytes: u64,
}

impl Piece {
    /// That many bytes from `address` on.
    #[must_use]
    pub fn new(address: u64, nbytes: usize) -> Self {
        // Of no bytes no word is read, wherever they are.
        if nbytes == 0 { Self::default() } else { Self { address, nbytes: nbytes as u64 } }
    }
}

/// What a kernel comes behind.
#[derive(Clone, Copy, Debug)]
pub enum Behind {
    /// What the stream holds.
    Stream(Stream),
    /// What is on the lane for uploads; its next event is behind the kernel.
    Uploads,
}

/// Selected channels of a block, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Channels {
    /// How many, along which axis.
    pub shape: Shape,
    /// How their masters become weights.
    pub kind: WeightKind,
    /// Address of the block's weight, of [`WeightKind::dtype`].
    pub weight: u64,
    /// Address of their state and, behind it, their indices, ascending
    /// ([`crate::adam::selected::ChannelState::within`]).
    pub state: u64,
    /// Whether a weight that differs from its rounded master becomes the master before the step:
    /// the program has written it. Only where nothing else writes weights between steps.
    pub follows_weight: bool,
}

/// Blocks with their gradients, by the step that they take: of equal scalars, so that one launch
/// can take them.
#[must_use]
pub fn by_step(
    blocks: impl Iterator<Item = (Step, (Channels, u64))>,
) -> Vec<(Step, Vec<(Channels, u64)>)> {
    let mut found: Vec<(Step, Vec<(Channels, u64)>)> = Vec::new();
    for (step, block) in blocks {
        match found.iter_mut().find(|(known, _)| known.steps_alike(&step)) {
            Some((_, blocks)) => blocks.push(block),
            None => found.push((step, vec![block])),
        }
    }
    found
}

/// What [`crate::offload`] needs of a device. Every method may be called from any thread that is
/// [`Attached`].
///
/// # Safety
/// DEV-1 to DEV-3 hold: the engine reads what was downloaded, and frees and writes what was copied,
/// as soon as the device says that an event is done or that it is drained.
pub unsafe trait Device: Send + Sync {
    /// The calling thread uses the device from now on; what it used before is kept for
    /// [`Device::detach`]. Cheap.
    ///
    /// # Errors
    /// [`Error::Os`] where the device refuses.
    fn attach(&self) -> Result<()>;

    /// The calling thread uses what it used before the last [`Device::attach`].
    fn detach(&self);

    /// Enqueues a copy of `nbytes` between device and host memory, in the lane's direction.
    ///
    /// # Safety
    /// Until the copy is done, both ranges are alive, nothing writes the one that is read, and
    /// nothing else uses the other.
    ///
    /// # Errors
    /// [`Error::Os`] where the device refuses, or has failed before.
    unsafe fn copy(&self, lane: Lane, device: u64, host: *mut u8, nbytes: usize) -> Result<()>;

    /// Records event number `event` behind all that is on the lane. Calls for one event do not run
    /// at the same time.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn record(&self, lane: Lane, event: usize) -> Result<()>;

    /// Blocks the calling thread until the event is done.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn wait(&self, event: usize) -> Result<()>;

    /// Marks what `stream` holds now.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn mark(&self, stream: Stream) -> Result<Mark>;

    /// Orders what is enqueued on `lane` from now on after what was marked.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn order_lane_after(&self, lane: Lane, mark: Mark) -> Result<()>;

    /// Orders what is launched on `stream` from now on after the event.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn order_stream_after(&self, stream: Stream, event: usize) -> Result<()>;

    /// Blocks the calling thread until both lanes are empty.
    ///
    /// # Errors
    /// As [`Device::copy`].
    fn drain(&self) -> Result<()>;

    /// Makes ready for [`Device::step_channels`] and [`Device::restore_weights`].
    ///
    /// # Errors
    /// [`Error::Os`] where the device cannot.
    fn prepare_channels(&self) -> Result<()> {
        Err(no_channels())
    }

    /// Steps selected channels of blocks on `stream`, each with the address of the gradient of its
    /// block, and writes their weights. In a launch or two for many blocks: a launch takes as long
    /// on the thread that calls this as one of the model's.
    ///
    /// # Safety
    /// Until it is done, all memory is alive, the indices are the block's, and nothing else writes
    /// what it reads or uses what it writes. No two of the blocks have memory in common.
    ///
    /// # Errors
    /// As [`Device::copy`].
    unsafe fn step_channels(
        &self,
        _stream: Stream,
        _blocks: &[(Channels, u64)],
        _step: &Step,
    ) -> Result<()> {
        Err(no_channels())
    }

    /// Writes the weights of selected channels from their masters, behind what is on the lane for
    /// uploads.
    ///
    /// # Safety
    /// As [`Device::step_channels`].
    ///
    /// # Errors
    /// As [`Device::copy`].
    unsafe fn restore_weights(&self, _channels: &Channels) -> Result<()> {
        Err(no_channels())
    }

    /// Makes ready for [`Device::checksums`].
    ///
    /// # Errors
    /// [`Error::Os`] where the device cannot.
    fn prepare_checksums(&self) -> Result<()>;

    /// Writes the checksums of memory: [`CHECKSUM_SUMS`] sums of 64 bits each, one after the other
    /// at `sums`. Words are those of 8 bytes that begin at multiples of 8; where memory begins or
    /// ends within one, its other bytes count as 0. [`mixed`] of the word at `i` is added to the
    /// sum `i / CHECKSUM_RUN % CHECKSUM_SUMS`, modulo 2^64. A word that changes changes its sum.
    /// Several that change, or change places, do but for a chance of some 2^-32: what one of them
    /// adds depends on all of its bits. (A product with the place alone is not enough: uppermost
    /// bits, which are signs, add up to nothing in pairs.)
    ///
    /// # Safety
    /// Until it is done, all memory is alive and of the device, `sums` is aligned to 8 bytes, and
    /// nothing else writes what it reads or uses what it writes.
    ///
    /// # Errors
    /// [`Error::Os`] where the device cannot.
    unsafe fn checksums(&self, behind: Behind, memory: &[Piece], sums: u64) -> Result<()>;

    /// Pins a range of host memory, so that copies from and to it need no detour.
    ///
    /// # Safety
    /// The range is alive until [`Device::unpin`].
    ///
    /// # Errors
    /// [`Error::Os`] where the device refuses.
    unsafe fn pin(&self, address: usize, nbytes: usize) -> Result<()>;

    /// Ends a [`Device::pin`]. No copy from or to the range is under way.
    fn unpin(&self, address: usize);
}

fn no_channels() -> Error {
    Error::value("the device steps no channels, expected a GPU with CUDA, or the host")
}

/// The calling thread uses a device, until this is dropped: then what it used before. Threads of
/// other libraries so find what they have set.
pub struct Attached<'a> {
    device: &'a dyn Device,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl<'a> Attached<'a> {
    /// See [`Device::attach`].
    ///
    /// # Errors
    /// [`Error::Os`] where the device refuses.
    pub fn to(device: &'a dyn Device) -> Result<Self> {
        device.attach()?;
        Ok(Self { device, _thread: PhantomData })
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        self.device.detach();
    }
}

/// The device that torch calls `name` (`cpu`, `cuda:0`), with room for `events` events.
///
/// # Errors
/// [`Error::Value`] for another name; [`Error::Os`] where there is no such device, or no driver.
pub fn open(name: &str, events: usize) -> Result<Arc<dyn Device>> {
    if name == "cpu" {
        return Ok(Arc::new(host::HostDevice::new(events)?));
    }
    let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
    match ordinal {
        Some(ordinal) => Ok(Arc::new(cuda::CudaDevice::new(ordinal, events)?)),
        None => Err(Error::value(format!(
            "device is `{name}`, expected cuda:N or cpu\n\
             hint: other accelerators are not supported yet"
        ))),
    }
}
