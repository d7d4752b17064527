//! The offload engine on the host as its device: the same bits as a step, in the right order, whole or not at all.

mod battery;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, ThreadId},
    time::Duration,
};

use battery::{Draw, Held, Layout, MomentsKind, ParamKind, Spread, is_hurried, pool_of, widest};
use stepwell::{
    Error,
    adam::Hyper,
    device::{Device, Lane, Mark, Stream, host::HostDevice},
    element::Dtype,
    isa::Isa,
    offload::{Engine, IN_FLIGHT, SEGMENT_LEN, Update},
    state::chunk::CHUNK_LEN,
    view::View,
};

/// What ends soon or never.
const SOON: Duration = Duration::from_secs(20);
/// How long something is watched that must not happen.
const WATCHED: Duration = Duration::from_millis(50);
const STREAM: Stream = Stream(0);

/// A tensor with its weight and its gradient on the device.
struct OnDevice {
    held: Held,
    weight: Vec<u8>,
    grad: Vec<u8>,
}

fn bytes(view: View) -> Vec<u8> {
    let nbytes = view.numel() * view.dtype().size();
    let from = std::ptr::with_exposed_provenance::<u8>(view.address());
    // SAFETY: the view is of a tensor that the caller holds.
    unsafe { std::slice::from_raw_parts(from, nbytes) }.to_vec()
}

impl OnDevice {
    fn new(mut held: Held) -> Self {
        let tensor = held.tensor();
        let grad = bytes(tensor.grad.expect("a gradient"));
        let weight = vec![0xa5; bytes(tensor.weight()).len()];
        held.set_grad(|_| 0.0);
        Self { held, weight, grad }
    }

    /// What the engine steps, once its gradient has come.
    fn update(&mut self, index: usize, count: u64, hyper: Hyper) -> Update {
        Update {
            index,
            tensor: self.held.tensor(),
            weight: self.weight.as_mut_ptr().expose_provenance() as u64,
            count,
            hyper,
        }
    }

    fn gradient(&mut self, index: usize) -> (usize, u64, View) {
        let host = self.held.tensor().grad.expect("a gradient");
        (index, self.grad.as_ptr().expose_provenance() as u64, host)
    }

    fn assert_uploaded(&mut self) {
        let weight = bytes(self.held.tensor().weight());
        assert!(self.weight == weight, "the device has another weight than the host: {:?}", self.held.layout);
    }
}

/// Lets copies go on when a test ends, also where it fails: dropping an engine waits for them. Made after the engine, so dropped before it.
struct Resumed<'a>(&'a HostDevice);

impl Drop for Resumed<'_> {
    fn drop(&mut self) {
        self.0.pause(Lane::Download, false);
        self.0.pause(Lane::Upload, false);
    }
}

fn numels(all: &[OnDevice]) -> Vec<usize> {
    all.iter().map(|one| one.held.numel).collect()
}

fn engine_on(device: Arc<dyn Device>, all: &[OnDevice], workers: usize) -> Engine {
    Engine::on(device, &numels(all), pool_of(workers), widest()).expect("an engine")
}

fn host_device(all: &[OnDevice]) -> Arc<HostDevice> {
    Arc::new(HostDevice::new(Engine::events(&numels(all))).expect("a device"))
}

fn take(engine: &Engine, all: &mut [OnDevice]) -> Result<(), Error> {
    let gradients: Vec<_> = all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    // SAFETY: the tensors outlive the step, which every test waits for or drops the engine for.
    unsafe { engine.take(&gradients, STREAM) }
}

/// What `call` returns, which waits for nothing; a test that hangs would not say why.
fn at_once<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(call()));
    receiver.recv_timeout(SOON).expect("a call that waits for nothing")
}

fn submit(engine: &Engine, all: &mut [OnDevice], count: u64, hyper: Hyper) -> Result<(), Error> {
    let updates = all.iter_mut().enumerate().map(|(index, one)| one.update(index, count, hyper)).collect();
    // SAFETY: as in `take`.
    unsafe { engine.submit(updates, STREAM) }
}

fn finish(engine: &Engine) {
    assert!(engine.finish(STREAM, SOON).expect("a step that works"), "the step takes too long");
    engine.drain().expect("copies that work");
}

/// Tensors of every state, some of several segments.
fn mixed() -> Vec<Held> {
    let sizes = if is_hurried() {
        [CHUNK_LEN + 65, 70, 1, 0, 33]
    } else {
        [SEGMENT_LEN + CHUNK_LEN + 5, CHUNK_LEN - 1, 1, 0, 3 * CHUNK_LEN]
    };
    let state = |(index, layout): (usize, Layout)| {
        // One large tensor is enough.
        let size = if index > 0 && index % sizes.len() == 0 { 2 * CHUNK_LEN + 1 } else { sizes[index % sizes.len()] };
        let mut held = Held::random(layout, size, 0, Spread::Ordinary, index as u64);
        held.key = index as u64;
        held
    };
    Layout::states().into_iter().enumerate().map(state).collect()
}

#[test]
fn a_step_is_that_of_the_batch_for_every_layout() {
    let hyper = Hyper { weight_decay: 0.1, grad_scale: 0.5, ..Hyper::default() };
    for workers in [1, 3] {
        let mut expected = mixed();
        let mut all: Vec<OnDevice> = expected.iter().map(|held| OnDevice::new(held.moved(0))).collect();
        let engine = engine_on(host_device(&all), &all, workers);
        for count in 1..=2 {
            take(&engine, &mut all).expect("gradients");
            submit(&engine, &mut all, count, hyper).expect("a step");
            finish(&engine);
            for (one, expected) in all.iter_mut().zip(&mut expected) {
                expected.step(widest(), count, &hyper);
                one.held.assert_same(expected, &format!("{:?}, step {count}", expected.layout));
                if count == 2 {
                    one.assert_uploaded();
                }
            }
        }
        let timing = engine.timing();
        let nbytes = |each: fn(&OnDevice) -> usize| all.iter().map(each).sum::<usize>() as u64;
        assert_eq!(timing.bytes_downloaded, nbytes(|one| one.grad.len()));
        assert_eq!(timing.bytes_uploaded, nbytes(|one| one.weight.len()));
    }
}

fn split(numel: usize, seed: u64) -> OnDevice {
    let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
    let mut held = Held::random(layout, numel, 0, Spread::Ordinary, seed);
    held.key = seed;
    OnDevice::new(held)
}

fn stepped(one: &OnDevice, count: u64, hyper: &Hyper) -> Held {
    let mut expected = one.held.moved(0);
    for (index, pair) in one.grad.chunks_exact(2).enumerate() {
        expected.grad.set_value(index, f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16));
    }
    expected.step(widest(), count, hyper);
    expected
}

#[test]
fn parts_of_a_gradient_are_waited_for_as_a_whole() {
    let mut all = [split(3 * CHUNK_LEN, 1)];
    let hyper = Hyper::default();
    let mut expected = stepped(&all[0], 1, &hyper);
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    let (_, source, host) = all[0].gradient(0);
    let half = host.numel() / 2 + 7;
    let part = |begin: usize, end: usize| {
        let view = View::new(host.address() + 2 * begin, host.dtype(), end - begin).expect("a view");
        (source + 2 * begin as u64, view)
    };
    // SAFETY: as in `take`.
    unsafe { engine.take_part(&[part(half, host.numel()), part(0, half)], STREAM) }.expect("parts");
    device.pause(Lane::Download, false);
    submit(&engine, &mut all, 1, hyper).expect("a step");
    finish(&engine);
    all[0].held.assert_same(&mut expected, "parts");
}

#[test]
fn nothing_is_stepped_before_its_gradient_has_come() {
    let mut all = [split(CHUNK_LEN + 9, 1), split(2 * CHUNK_LEN, 2)];
    let hyper = Hyper::default();
    let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, 1, &hyper)).collect();
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    let _resumed = Resumed(&device);
    take(&engine, &mut all[..1]).expect("a gradient");
    engine.drain().expect("copies");
    device.pause(Lane::Download, true);
    let second = all[1].gradient(1);
    // SAFETY: as in `take`.
    unsafe { engine.take(&[second], STREAM) }.expect("a gradient");
    submit(&engine, &mut all, 1, hyper).expect("a step");
    let whole = |one: &OnDevice| 0..one.held.numel;
    assert!(engine.wait(0, &whole(&all[0]), STREAM, SOON).expect("the first"), "its gradient was there");
    assert!(!engine.wait(1, &whole(&all[1]), STREAM, WATCHED).expect("the second"), "its gradient was not");
    assert!(engine.is_busy() && all[1].weight.iter().all(|&byte| byte == 0xa5));
    device.pause(Lane::Download, false);
    finish(&engine);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.assert_same(expected, "late gradients");
        one.assert_uploaded();
    }
}

#[test]
fn a_stream_waits_for_the_upload_itself() {
    let mut all = [split(CHUNK_LEN, 1)];
    let device = host_device(&all);
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1));
    let _resumed = Resumed(&device);
    take(&engine, &mut all).expect("a gradient");
    device.pause(Lane::Upload, true);
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let (sender, receiver) = mpsc::channel();
    let waiting = {
        let engine = Arc::clone(&engine);
        thread::spawn(move || sender.send(engine.wait(0, &(5..6), STREAM, SOON)).expect("a receiver"))
    };
    assert!(receiver.recv_timeout(WATCHED).is_err(), "the weight is not there, and the stream went on");
    device.pause(Lane::Upload, false);
    assert!(receiver.recv_timeout(SOON).expect("an answer").expect("a step that works"));
    all[0].assert_uploaded();
    waiting.join().expect("no panic");
}

#[test]
fn a_weight_is_not_written_while_it_is_uploaded() {
    let mut all = [split(CHUNK_LEN, 1)];
    let hyper = Hyper { lr: 0.5, ..Hyper::default() };
    let first = stepped(&all[0], 1, &hyper);
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device.host);
    device.streams_wait.store(false, Ordering::Relaxed);
    take(&engine, &mut all).expect("a gradient");
    device.host.pause(Lane::Upload, true);
    submit(&engine, &mut all, 1, hyper).expect("a step");
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 2, hyper).expect("a step");
    assert!(!engine.finish(STREAM, WATCHED).expect("a step that works"), "the last weight is still on its way");
    let mut now = all[0].held.moved(0);
    now.set_grad(|_| 0.0);
    let mut first = first;
    first.set_grad(|_| 0.0);
    now.assert_same(&mut first, "the weight on its way");
    device.host.pause(Lane::Upload, false);
    finish(&engine);
    all[0].assert_uploaded();
}

#[test]
fn what_is_refused_changes_nothing() {
    let mut all = [split(CHUNK_LEN, 1), split(10, 2)];
    let engine = engine_on(host_device(&all), &all, 1);
    take(&engine, &mut all).expect("gradients");
    engine.drain().expect("copies");
    let before: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let hyper = Hyper::default();
    let refused = |updates: Vec<Update>, said: &str| {
        // SAFETY: as in `take`; it is refused.
        let message = unsafe { engine.submit(updates, STREAM) }.expect_err("must be refused").to_string();
        assert!(message.contains(said), "{message}");
    };
    refused(vec![all[0].update(2, 1, hyper)], "tensor `2`");
    refused(vec![all[0].update(1, 1, hyper)], "elements");
    refused(vec![all[0].update(0, 1, hyper), all[0].update(0, 1, hyper)], "twice");
    refused(vec![all[0].update(0, 0, hyper)], "steps[0]");
    refused(vec![all[1].update(1, 1, hyper), all[0].update(0, 1, Hyper { lr: f64::NAN, ..hyper })], "lr");
    let mut without = all[0].update(0, 1, hyper);
    without.tensor.grad = None;
    refused(vec![without], "no grad");
    let mut overlapping = all[0].update(0, 1, hyper);
    overlapping.tensor.exp_avg = overlapping.tensor.exp_avg_sq;
    refused(vec![overlapping], "overlap");
    assert!(engine.wait(7, &(0..1), STREAM, WATCHED).is_err() && engine.wait(1, &(3..11), STREAM, WATCHED).is_err());
    assert!(!engine.is_busy());
    for (one, before) in all.iter_mut().zip(before) {
        one.held.assert_same(&mut before.moved(0), "refused");
        assert!(one.weight.iter().all(|&byte| byte == 0xa5));
    }
}

#[test]
fn a_running_step_refuses_the_next() {
    let mut all = [split(CHUNK_LEN, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    for refused in [take(&engine, &mut all), submit(&engine, &mut all, 2, Hyper::default()), engine.drain()] {
        assert!(refused.expect_err("must be refused").to_string().contains("still running"));
    }
    device.pause(Lane::Download, false);
    finish(&engine);
}

/// More tensors than the device is given copies at once, small ones.
fn many() -> Vec<OnDevice> {
    (0..3 * IN_FLIGHT as u64).map(|seed| split(70 + seed as usize, seed)).collect()
}

/// Takes and submits on another thread, in the order given, and waits for neither.
fn step_at_once(engine: &Arc<Engine>, all: &mut [OnDevice], order: &[usize], count: u64) {
    let gradients: Vec<_> = all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    let updates: Vec<_> = order.iter().map(|&index| all[index].update(index, count, Hyper::default())).collect();
    let engine = Arc::clone(engine);
    // SAFETY: as in `take`.
    at_once(move || unsafe { engine.take(&gradients, STREAM).and_then(|()| engine.submit(updates, STREAM)) })
        .expect("a step");
}

#[test]
fn nothing_is_stepped_before_the_device_has_been_given_its_copy() {
    let mut all = many();
    let device = host_device(&all);
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2));
    let _resumed = Resumed(&device);
    // The first to be stepped are the last to be copied. In the second step their events are those of the first, and done.
    let order: Vec<usize> = (0..all.len()).rev().collect();
    for count in 1..=2 {
        for one in &mut all {
            one.grad.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x80);
        }
        let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, count, &Hyper::default())).collect();
        device.pause(Lane::Download, true);
        step_at_once(&engine, &mut all, &order, count);
        assert!(!engine.wait(order[0], &(0..1), STREAM, WATCHED).expect("no failure"), "stepped without its gradient");
        device.pause(Lane::Download, false);
        finish(&engine);
        for (one, expected) in all.iter_mut().zip(&mut expected) {
            one.held.assert_same(expected, &format!("step {count}"));
            one.assert_uploaded();
        }
    }
}

#[test]
fn parts_that_the_device_has_not_been_given_are_waited_for() {
    let length = 50;
    let mut all = [split(3 * IN_FLIGHT * length, 1)];
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let device = host_device(&all);
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2));
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    let (_, source, host) = all[0].gradient(0);
    let part = |begin: usize| {
        let view = View::new(host.address() + 2 * begin, host.dtype(), length).expect("a view");
        (source + 2 * begin as u64, view)
    };
    let parts: Vec<_> = (0..host.numel()).step_by(length).map(part).collect();
    let updates = vec![all[0].update(0, 1, Hyper::default())];
    let stepping = Arc::clone(&engine);
    // SAFETY: as in `take`.
    at_once(move || unsafe { stepping.take_part(&parts, STREAM).and_then(|()| stepping.submit(updates, STREAM)) })
        .expect("a step");
    assert!(!engine.wait(0, &(0..1), STREAM, WATCHED).expect("no failure"), "stepped without its gradient");
    device.pause(Lane::Download, false);
    finish(&engine);
    all[0].held.assert_same(&mut expected, "parts");
}

#[test]
fn gradients_may_be_written_when_they_are_released() {
    let mut all = many();
    let device = Arc::new(Gated::new(&all));
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2));
    let _resumed = Resumed(&device.host);
    let order: Vec<usize> = (0..all.len()).collect();
    for count in 1..=2 {
        let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, count, &Hyper::default())).collect();
        device.host.pause(Lane::Download, true);
        device.streams_wait.store(false, Ordering::Relaxed);
        device.calls.lock().expect("no panic").clear();
        step_at_once(&engine, &mut all, &order, count);
        assert!(!engine.release(STREAM, WATCHED).expect("no failure"), "the device has not been given all copies");
        let is_copy = |call: &Call| matches!(call, Call::Copy(Lane::Download, _));
        let given = device.calls.lock().expect("no panic").iter().filter(|(_, call)| is_copy(call)).count();
        assert!(given <= IN_FLIGHT, "`{given}` copies are with the device at once");
        device.streams_wait.store(true, Ordering::Relaxed);
        device.host.pause(Lane::Download, false);
        assert!(engine.release(STREAM, SOON).expect("no failure"), "all are there");
        all.iter_mut().for_each(|one| one.grad.fill(0x3f));
        finish(&engine);
        for (one, expected) in all.iter_mut().zip(&mut expected) {
            one.held.assert_same(expected, &format!("step {count}"));
        }
    }
}

#[test]
fn copies_are_handed_over_in_order_each_after_its_mark_and_by_the_engine() {
    let mut all = [split(30, 1)];
    let sources: Vec<Vec<u8>> = (0..3 * IN_FLIGHT).map(|value| vec![value as u8; all[0].grad.len()]).collect();
    let addresses: Vec<u64> = sources.iter().map(|source| source.as_ptr().expose_provenance() as u64).collect();
    let device = Arc::new(Gated::new(&all));
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1));
    let _resumed = Resumed(&device.host);
    device.host.pause(Lane::Download, true);
    let (_, _, host) = all[0].gradient(0);
    let (taking, taken) = (Arc::clone(&engine), addresses.clone());
    let caller = at_once(move || {
        for source in taken {
            // SAFETY: as in `take`.
            unsafe { taking.take(&[(0, source, host)], STREAM) }.expect("a gradient");
        }
        thread::current().id()
    });
    device.host.pause(Lane::Download, false);
    engine.drain().expect("copies");
    assert_eq!(bytes(host), sources[sources.len() - 1], "the last copy is the one that counts");
    let calls = device.calls.lock().expect("no panic");
    let by = |is_caller: bool| calls.iter().filter(move |(thread, _)| (*thread == caller) == is_caller);
    assert!(by(true).all(|(_, call)| *call == Call::Mark), "{calls:?}");
    assert_eq!(by(true).count(), sources.len());
    let handed_over: Vec<Call> = by(false).map(|&(_, call)| call).collect();
    let download = Lane::Download;
    let each = |source| [Call::After(download), Call::Copy(download, source), Call::Record(download, 0)];
    assert_eq!(handed_over, addresses.into_iter().flat_map(each).collect::<Vec<_>>());
    let issuer = by(false).next().map(|&(thread, _)| thread);
    assert!(by(false).all(|&(thread, _)| Some(thread) == issuer), "by one thread");
}

#[test]
fn copies_that_fail_fail_the_step_and_whoever_waits() {
    for panics in [false, true] {
        let mut all = many();
        let device = Arc::new(Gated::new(&all));
        let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2));
        let _resumed = Resumed(&device.host);
        device.host.pause(Lane::Download, true);
        let order: Vec<usize> = (0..all.len()).rev().collect();
        step_at_once(&engine, &mut all, &order, 1);
        device.panics.store(panics, Ordering::Relaxed);
        device.downloads_left.store(0, Ordering::Relaxed);
        device.host.pause(Lane::Download, false);
        let said = if panics { "out of its mind" } else { "out of order" };
        let message = engine.finish(STREAM, SOON).expect_err("must fail").to_string();
        assert!(message.contains(said) && message.contains("checkpoint"), "{message}");
        let message = engine.release(STREAM, SOON).expect_err("must fail").to_string();
        assert!(message.contains(said), "{message}");
        device.downloads_left.store(usize::MAX, Ordering::Relaxed);
        assert!(take(&engine, &mut all).is_err() && engine.drain().is_err());
        assert!(engine.wait(0, &(0..1), STREAM, SOON).is_err());
    }
}

#[test]
fn copies_that_have_failed_refuse_the_step() {
    let mut all = many();
    let before: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    device.downloads_left.store(IN_FLIGHT + 1, Ordering::Relaxed);
    take(&engine, &mut all).expect("gradients");
    assert!(engine.drain().expect_err("must fail").to_string().contains("out of order"));
    for refused in [take(&engine, &mut all), submit(&engine, &mut all, 1, Hyper::default())] {
        let message = refused.expect_err("must be refused").to_string();
        assert!(message.contains("copies to the host have failed") && message.contains("out of order"), "{message}");
    }
    assert!(!engine.is_busy());
    for (one, mut before) in all.iter_mut().zip(before) {
        before.set_grad(|_| 0.0);
        one.held.set_grad(|_| 0.0);
        one.held.assert_same(&mut before, "refused");
    }
}

#[test]
fn dropping_waits_for_gradients_that_nobody_has_submitted() {
    let mut all = many();
    let device = host_device(&all);
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1));
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    let gradients: Vec<_> = all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    let (sender, receiver) = mpsc::channel();
    let dropping = thread::spawn(move || {
        // SAFETY: as in `take`.
        unsafe { engine.take(&gradients, STREAM) }.expect("gradients");
        drop(engine);
        sender.send(()).expect("a receiver");
    });
    assert!(receiver.recv_timeout(WATCHED).is_err(), "the memory may be freed, and copies are still to come");
    device.pause(Lane::Download, false);
    receiver.recv_timeout(SOON).expect("an end");
    dropping.join().expect("no panic");
    for one in &mut all {
        assert_eq!(bytes(one.held.tensor().grad.expect("a gradient")), one.grad);
    }
}

#[test]
fn a_device_that_fails_breaks_the_engine() {
    let mut all = [split(3 * CHUNK_LEN, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    take(&engine, &mut all).expect("a gradient");
    device.uploads_fail.store(true, Ordering::Relaxed);
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let message = engine.finish(STREAM, SOON).expect_err("must fail").to_string();
    assert!(message.contains("out of order") && message.contains("checkpoint"), "{message}");
    device.uploads_fail.store(false, Ordering::Relaxed);
    assert!(take(&engine, &mut all).is_err() && engine.wait(0, &(0..1), STREAM, WATCHED).is_err());
    drop(engine);
}

#[test]
fn dropping_waits_for_the_step() {
    let mut all = [split(2 * SEGMENT_LEN / if is_hurried() { 64 } else { 1 }, 1)];
    let hyper = Hyper::default();
    let mut expected = stepped(&all[0], 1, &hyper);
    let engine = engine_on(host_device(&all), &all, 2);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, hyper).expect("a step");
    drop(engine);
    all[0].held.assert_same(&mut expected, "dropped");
    all[0].assert_uploaded();
}

#[test]
fn a_nonsense_device_is_refused() {
    for (name, said) in [("cuda", "cuda:N"), ("xpu:0", "xpu:0"), ("cuda:-", "cuda:-")] {
        let Err(error) = Engine::new(name, &[1], pool_of(1), Isa::Scalar) else { panic!("`{name}` was taken") };
        assert!(matches!(&error, Error::Value(message) if message.contains(said)), "{error}");
    }
    let Err(error) = Engine::new("cuda:4095", &[1], pool_of(1), Isa::Scalar) else { panic!("no such device") };
    assert!(matches!(error, Error::Os { .. }), "{error}");
}

/// A host device whose streams may go on without waiting, as those of a GPU do on this side of the bus, and that fails when told to.
struct Gated {
    host: HostDevice,
    streams_wait: AtomicBool,
    uploads_fail: AtomicBool,
    /// How many more copies to the host are taken.
    downloads_left: AtomicUsize,
    /// Whether the next panics, instead of failing.
    panics: AtomicBool,
    /// What was asked of it, and by whom.
    calls: Mutex<Vec<(ThreadId, Call)>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Mark,
    After(Lane),
    Copy(Lane, u64),
    Record(Lane, usize),
}

impl Gated {
    fn new(all: &[OnDevice]) -> Self {
        Self {
            host: HostDevice::new(Engine::events(&numels(all))).expect("a device"),
            streams_wait: AtomicBool::new(true),
            uploads_fail: AtomicBool::new(false),
            downloads_left: AtomicUsize::new(usize::MAX),
            panics: AtomicBool::new(false),
            calls: Mutex::default(),
        }
    }

    fn note(&self, call: Call) {
        self.calls.lock().expect("no panic").push((thread::current().id(), call));
    }
}

impl Device for Gated {
    fn attach(&self) -> Result<(), Error> {
        self.host.attach()
    }

    unsafe fn copy(&self, lane: Lane, device: u64, host: *mut u8, nbytes: usize) -> Result<(), Error> {
        let fails = match lane {
            Lane::Upload => self.uploads_fail.load(Ordering::Relaxed),
            Lane::Download => {
                let one_less = |left: usize| left.checked_sub(1);
                self.downloads_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
            }
        };
        if fails {
            assert!(!self.panics.load(Ordering::Relaxed), "the device is out of its mind");
            return Err(Error::os("copy", std::io::Error::other("the bus is out of order")));
        }
        self.note(Call::Copy(lane, device));
        // SAFETY: passed on.
        unsafe { self.host.copy(lane, device, host, nbytes) }
    }

    fn record(&self, lane: Lane, event: usize) -> Result<(), Error> {
        self.note(Call::Record(lane, event));
        self.host.record(lane, event)
    }

    fn wait(&self, event: usize) -> Result<(), Error> {
        self.host.wait(event)
    }

    fn mark(&self, stream: Stream) -> Result<Mark, Error> {
        self.note(Call::Mark);
        self.host.mark(stream)
    }

    fn order_lane_after(&self, lane: Lane, mark: Mark) -> Result<(), Error> {
        self.note(Call::After(lane));
        self.host.order_lane_after(lane, mark)
    }

    fn order_stream_after(&self, stream: Stream, event: usize) -> Result<(), Error> {
        if self.streams_wait.load(Ordering::Relaxed) { self.host.order_stream_after(stream, event) } else { Ok(()) }
    }

    fn drain(&self) -> Result<(), Error> {
        self.host.drain()
    }

    unsafe fn pin(&self, address: usize, nbytes: usize) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.host.pin(address, nbytes) }
    }

    fn unpin(&self, address: usize) {
        self.host.unpin(address);
    }
}

#[test]
fn lanes_copy_in_order_and_by_themselves() {
    let device = HostDevice::new(2).expect("a device");
    let mut draw = Draw::new(3);
    let source: Vec<u8> = (0..4096).map(|_| draw.below(256) as u8).collect();
    let (mut there, mut back) = (vec![0_u8; 4096], vec![0_u8; 4096]);
    device.pause(Lane::Download, true);
    let address = there.as_mut_ptr().expose_provenance() as u64;
    // SAFETY: all three outlive the copies, which are drained below.
    unsafe {
        device.copy(Lane::Upload, address, source.as_ptr().cast_mut(), 4096).expect("a copy");
        device.record(Lane::Upload, 0).expect("an event");
        device.copy(Lane::Download, address, back.as_mut_ptr(), 4096).expect("a copy");
        device.record(Lane::Download, 1).expect("an event");
    }
    device.wait(0).expect("the other lane does not wait");
    assert_eq!(there, source);
    assert!(back.iter().all(|&byte| byte == 0));
    device.pause(Lane::Download, false);
    device.wait(1).expect("done");
    assert_eq!(back, source);
    device.drain().expect("empty");
}
