//! What the tests of the engine share: tensors with their weights and gradients on a device that is
//! the host, and devices that fail or are watched.
#![allow(dead_code, reason = "every test file uses a part of it")]

#[cfg(thread_sanitizer)]
#[path = "../../rust/sync/sanitized.rs"]
mod locks;
#[cfg(not(thread_sanitizer))]
mod locks {
    pub(crate) use std::sync::{Condvar, Mutex};
}
pub(crate) mod tier;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use stepwell::{
    Error,
    adam::{Hyper, Step},
    device::{Behind, Channels, Device, Lane, Mark, Piece, Stream, host::HostDevice},
    host::pool::Pool,
    offload::{Engine, Lent, Owners, Shape, Update},
    stream::{element::Dtype, view::View},
    tier::{Tier, ram::Ram},
};

use locks::Mutex;

use super::battery::{Held, Layout, MomentsKind, ParamKind, Spread, pool_of, widest};

/// What ends soon or never.
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// How long something is watched that must not happen.
pub(crate) const WATCHED: Duration = Duration::from_millis(50);
pub(crate) const STREAM: Stream = Stream::DEFAULT;

/// A tensor with its weight and its gradient on the device.
pub(crate) struct OnDevice {
    pub(crate) held: Held,
    pub(crate) weight: Vec<u8>,
    pub(crate) grad: Vec<u8>,
}

/// Another gradient, in memory of its own.
pub(crate) fn negated(grad: &[u8]) -> Vec<u8> {
    let mut negated = grad.to_vec();
    negated.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x80);
    negated
}

pub(crate) fn bytes(view: View) -> Vec<u8> {
    let nbytes = view.numel() * view.dtype().size();
    let from = std::ptr::with_exposed_provenance::<u8>(view.address());
    // SAFETY: the view is of a tensor that the caller holds.
    unsafe { std::slice::from_raw_parts(from, nbytes) }.to_vec()
}

impl OnDevice {
    pub(crate) fn new(mut held: Held) -> Self {
        let tensor = held.tensor();
        let grad = bytes(tensor.grad.expect("a gradient"));
        let weight = vec![0xa5; bytes(tensor.weight()).len()];
        held.set_grad(|_| 0.0);
        Self { held, weight, grad }
    }

    /// What the engine steps, once its gradient has come.
    pub(crate) fn update(&mut self, index: usize, count: u64, hyper: Hyper) -> Update {
        Update {
            index,
            tensor: self.held.tensor(),
            weight: Some(self.weight.as_mut_ptr().expose_provenance() as u64),
            is_at_once: false,
            count,
            hyper,
        }
    }

    pub(crate) fn gradient(&mut self, index: usize) -> (usize, u64, View) {
        let host = self.held.tensor().grad.expect("a gradient");
        (index, self.grad.as_ptr().expose_provenance() as u64, host)
    }

    pub(crate) fn assert_uploaded(&mut self) {
        let weight = bytes(self.held.tensor().weight());
        assert!(
            self.weight == weight,
            "the device has another weight than the host: {:?}",
            self.held.layout
        );
    }
}

/// Lets copies go on when a test ends, also where it fails: dropping an engine waits for them. Made
/// after the engine, so dropped before it.
pub(crate) struct Resumed<'a>(pub(crate) &'a HostDevice);

impl Drop for Resumed<'_> {
    fn drop(&mut self) {
        self.0.pause(Lane::Download, false);
        self.0.pause(Lane::Upload, false);
    }
}

pub(crate) fn numels(all: &[OnDevice]) -> Vec<usize> {
    all.iter().map(|one| one.held.numel).collect()
}

/// Room for two generations, whether an engine has them or not.
pub(crate) fn events(all: &[OnDevice]) -> usize {
    Engine::events(Shape { numels: &numels(all), generations: 2, deferral: None })
}

pub(crate) fn engine_on(device: Arc<dyn Device>, all: &[OnDevice], workers: usize) -> Engine {
    engine_with(device, all, 1, Arc::new(Ram), workers)
}

pub(crate) fn engine_with(
    device: Arc<dyn Device>,
    all: &[OnDevice],
    generations: usize,
    tier: Arc<dyn Tier>,
    workers: usize,
) -> Engine {
    engine_in(pool_of(workers), device, all, generations, tier)
}

pub(crate) fn engine_in(
    pool: Pool,
    device: Arc<dyn Device>,
    all: &[OnDevice],
    generations: usize,
    tier: Arc<dyn Tier>,
) -> Engine {
    let shape = Shape { numels: &numels(all), generations, deferral: None };
    Engine::on(device, shape, tier, pool, widest()).expect("an engine")
}

pub(crate) fn host_device(all: &[OnDevice]) -> Arc<HostDevice> {
    Arc::new(HostDevice::new(events(all)).expect("a device"))
}

/// Takes gradients, for which there is room.
///
/// # Safety
/// As [`Engine::take`].
pub(crate) unsafe fn take_these(
    engine: &Engine,
    gradients: &[(usize, u64, View)],
) -> Result<(), Error> {
    // SAFETY: passed on.
    let queued = unsafe { engine.take(gradients, &mut None, STREAM, SOON) }?;
    assert!(queued, "there is no room");
    Ok(())
}

/// Takes parts, for which there is room.
///
/// # Safety
/// As [`Engine::take_part`].
pub(crate) unsafe fn take_parts(engine: &Engine, parts: &[(u64, View)]) -> Result<(), Error> {
    // SAFETY: passed on.
    let queued = unsafe { engine.take_part(parts, &mut None, STREAM, SOON) }?;
    assert!(queued, "there is no room");
    Ok(())
}

/// Says when it is dropped.
pub(crate) struct Witness(pub(crate) Arc<AtomicUsize>);

impl Drop for Witness {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Owners that say when they are dropped.
pub(crate) fn witness() -> (Owners, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    (Box::new(Witness(Arc::clone(&dropped))), dropped)
}

/// How often a witness was dropped.
pub(crate) fn count(dropped: &AtomicUsize) -> usize {
    dropped.load(Ordering::SeqCst)
}

/// Owners of both sides of gradients.
pub(crate) fn lent() -> (Option<Lent>, [Arc<AtomicUsize>; 2]) {
    let ((sources, first), (targets, second)) = (witness(), witness());
    (Some(Lent { sources, targets }), [first, second])
}

pub(crate) fn take(engine: &Engine, all: &mut [OnDevice]) -> Result<(), Error> {
    let gradients: Vec<_> =
        all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    // SAFETY: the tensors outlive the step, which every test waits for or drops the engine for.
    unsafe { take_these(engine, &gradients) }
}

/// Waits for what another thread does.
pub(crate) fn wait_until(is_there: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is_there() {
        assert!(begin.elapsed() < SOON, "it does not come");
        thread::yield_now();
    }
}

/// What `call` returns, which waits for nothing; a test that hangs would not say why.
pub(crate) fn at_once<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(call()));
    receiver.recv_timeout(SOON).expect("a call that waits for nothing")
}

pub(crate) fn submit(
    engine: &Engine,
    all: &mut [OnDevice],
    count: u64,
    hyper: Hyper,
) -> Result<(), Error> {
    let updates: Vec<_> =
        all.iter_mut().enumerate().map(|(index, one)| one.update(index, count, hyper)).collect();
    // SAFETY: as in `take`.
    unsafe { engine.submit(&updates, &mut None, STREAM) }
}

pub(crate) fn finish(engine: &Engine) {
    assert!(engine.finish(STREAM, SOON).expect("a step that works"), "the step takes too long");
    drain(engine).expect("copies that work");
}

/// Discards what was taken, and waits for its copies.
pub(crate) fn discard(engine: &Engine) {
    if let Some(discarded) = engine.discard().expect("a device that works") {
        let is_over = engine.wait_discarded(discarded, SOON).expect("copies that work");
        assert!(is_over, "copies take too long");
    }
}

pub(crate) fn drain(engine: &Engine) -> Result<(), Error> {
    assert!(engine.drain(SOON)?, "copies take too long");
    Ok(())
}

pub(crate) fn split(numel: usize, seed: u64) -> OnDevice {
    let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
    let mut held = Held::random(layout, numel, 0, Spread::Ordinary, seed);
    held.key = seed;
    OnDevice::new(held)
}

pub(crate) fn stepped(one: &OnDevice, count: u64, hyper: &Hyper) -> Held {
    let mut expected = one.held.moved(0);
    for (index, pair) in one.grad.chunks_exact(2).enumerate() {
        expected.grad.set_value(
            index,
            f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16),
        );
    }
    expected.step(widest(), count, hyper);
    expected
}

/// A host device whose streams may go on without waiting, as those of a GPU do on this side of the
/// bus, and that fails when told to.
pub(crate) struct Gated {
    pub(crate) host: HostDevice,
    pub(crate) streams_wait: AtomicBool,
    pub(crate) uploads_fail: AtomicBool,
    /// How many more copies to the host are taken.
    pub(crate) downloads_left: AtomicUsize,
    /// How many more blocks of selected channels are stepped.
    pub(crate) steps_left: AtomicUsize,
    /// Whether the next panics, instead of failing.
    pub(crate) panics: AtomicBool,
    /// How often each thread is attached.
    pub(crate) depths: Mutex<HashMap<ThreadId, isize>>,
    /// What was asked of it, and on which thread.
    pub(crate) calls: Mutex<Vec<(ThreadId, Call)>>,
    /// Addresses of what is pinned.
    pub(crate) pinned: Mutex<Vec<usize>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Call {
    Mark,
    After(Lane),
    Copy(Lane, u64),
    Record(Lane, usize),
}

impl Gated {
    pub(crate) fn new(all: &[OnDevice]) -> Self {
        Self::with_events(events(all))
    }

    pub(crate) fn with_events(events: usize) -> Self {
        Self {
            host: HostDevice::new(events).expect("a device"),
            streams_wait: AtomicBool::new(true),
            uploads_fail: AtomicBool::new(false),
            downloads_left: AtomicUsize::new(usize::MAX),
            steps_left: AtomicUsize::new(usize::MAX),
            panics: AtomicBool::new(false),
            depths: Mutex::default(),
            calls: Mutex::default(),
            pinned: Mutex::default(),
        }
    }

    fn out_of_order() -> Error {
        Error::os("copy", std::io::Error::other("the bus is out of order"))
    }

    pub(crate) fn log(&self, call: Call) {
        self.calls.lock().expect("no panic").push((thread::current().id(), call));
    }
}

// SAFETY: it copies and waits as the host device. Where a test says that streams do not wait, it
// launches nothing that would have to.
unsafe impl Device for Gated {
    fn attach(&self) -> Result<(), Error> {
        *self.depths.lock().expect("no panic").entry(thread::current().id()).or_default() += 1;
        self.host.attach()
    }

    fn detach(&self) {
        *self.depths.lock().expect("no panic").entry(thread::current().id()).or_default() -= 1;
        self.host.detach();
    }

    unsafe fn copy(
        &self,
        lane: Lane,
        device: u64,
        host: *mut u8,
        nbytes: usize,
    ) -> Result<(), Error> {
        let fails = match lane {
            Lane::Upload => self.uploads_fail.load(Ordering::Relaxed),
            Lane::Download => !has_left(&self.downloads_left),
        };
        if fails {
            assert!(!self.panics.load(Ordering::Relaxed), "the device is out of its mind");
            return Err(Self::out_of_order());
        }
        self.log(Call::Copy(lane, device));
        // SAFETY: passed on.
        unsafe { self.host.copy(lane, device, host, nbytes) }
    }

    fn record(&self, lane: Lane, event: usize) -> Result<(), Error> {
        self.log(Call::Record(lane, event));
        self.host.record(lane, event)
    }

    fn wait(&self, event: usize) -> Result<(), Error> {
        self.host.wait(event)
    }

    fn mark(&self, stream: Stream) -> Result<Mark, Error> {
        self.log(Call::Mark);
        self.host.mark(stream)
    }

    fn order_lane_after(&self, lane: Lane, mark: Mark) -> Result<(), Error> {
        self.log(Call::After(lane));
        self.host.order_lane_after(lane, mark)
    }

    fn order_stream_after(&self, stream: Stream, event: usize) -> Result<(), Error> {
        if self.streams_wait.load(Ordering::Relaxed) {
            self.host.order_stream_after(stream, event)
        } else {
            Ok(())
        }
    }

    fn drain(&self) -> Result<(), Error> {
        self.host.drain()
    }

    fn prepare_channels(&self) -> Result<(), Error> {
        self.host.prepare_channels()
    }

    unsafe fn step_channels(
        &self,
        stream: Stream,
        blocks: &[(Channels, u64)],
        step: &Step,
    ) -> Result<(), Error> {
        for block in blocks {
            if !has_left(&self.steps_left) {
                return Err(Self::out_of_order());
            }
            // SAFETY: passed on.
            unsafe { self.host.step_channels(stream, std::slice::from_ref(block), step)? };
        }
        Ok(())
    }

    unsafe fn restore_weights(&self, channels: &Channels) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.host.restore_weights(channels) }
    }

    fn prepare_checksums(&self) -> Result<(), Error> {
        self.host.prepare_checksums()
    }

    unsafe fn checksums(&self, behind: Behind, memory: &[Piece], sums: u64) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.host.checksums(behind, memory, sums) }
    }

    unsafe fn pin(&self, address: usize, nbytes: usize) -> Result<(), Error> {
        self.pinned.lock().expect("no panic").push(address);
        // SAFETY: passed on.
        unsafe { self.host.pin(address, nbytes) }
    }

    fn unpin(&self, address: usize) {
        self.pinned.lock().expect("no panic").retain(|&pinned| pinned != address);
        self.host.unpin(address);
    }
}

/// Takes one of what is left, if there is one.
fn has_left(left: &AtomicUsize) -> bool {
    let one_less = |left: usize| left.checked_sub(1);
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
}
