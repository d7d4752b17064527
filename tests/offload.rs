//! The offload engine on the host as its device: the same bits as a step, in the right order, whole
//! or not at all.

mod battery;
mod on_device;

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
};

use battery::{Draw, Held, Layout, Spread, is_hurried, pool_of, widest};
use on_device::{
    Call, Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, drain, engine_on, events, finish,
    host_device, split, stepped, submit, take, take_parts, take_these,
};
use stepwell::{
    Error,
    adam::Hyper,
    device::{Device, Lane, host::HostDevice},
    offload::{Engine, IN_FLIGHT, SEGMENT_LEN, Shape, Update},
    simd::isa::Isa,
    state::chunk::CHUNK_LEN,
    stream::view::View,
};

/// Tensors of every state, some of several segments.
fn mixed() -> Vec<Held> {
    let sizes = if is_hurried() {
        [CHUNK_LEN + 65, 70, 1, 0, 33]
    } else {
        [SEGMENT_LEN + CHUNK_LEN + 5, CHUNK_LEN - 1, 1, 0, 3 * CHUNK_LEN]
    };
    let state = |(index, layout): (usize, Layout)| {
        // One large tensor is enough.
        let size = if index > 0 && index % sizes.len() == 0 {
            2 * CHUNK_LEN + 1
        } else {
            sizes[index % sizes.len()]
        };
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
        let mut all: Vec<OnDevice> =
            expected.iter().map(|held| OnDevice::new(held.moved(0))).collect();
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

#[test]
fn a_weight_that_stays_in_host_memory_is_stepped_and_not_uploaded() {
    let hyper = Hyper::default();
    let mut all = [split(SEGMENT_LEN + 9, 1), split(CHUNK_LEN + 3, 2)];
    let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, 1, &hyper)).collect();
    let engine = engine_on(host_device(&all), &all, 2);
    take(&engine, &mut all).expect("gradients");
    let uploaded = all[0].update(0, 1, hyper);
    let staying = Update { weight: None, ..all[1].update(1, 1, hyper) };
    // SAFETY: as in `submit`.
    unsafe { engine.submit(&[uploaded, staying], &mut None, STREAM) }.expect("a step");
    // What waits for it waits for its step.
    let whole = 0..all[1].held.numel;
    assert!(engine.wait(1, &whole, STREAM, SOON).expect("the second"), "it is not stepped");
    all[1].held.assert_same(&mut expected[1], "staying");
    finish(&engine);
    all[0].held.assert_same(&mut expected[0], "uploaded");
    all[0].assert_uploaded();
    assert!(all[1].weight.iter().all(|&byte| byte == 0xa5));
    assert_eq!(engine.timing().bytes_uploaded, all[0].weight.len() as u64);
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
        let view =
            View::new(host.address() + 2 * begin, host.dtype(), end - begin).expect("a view");
        (source + 2 * begin as u64, view)
    };
    // SAFETY: as in `take`.
    unsafe { take_parts(&engine, &[part(half, host.numel()), part(0, half)]) }.expect("parts");
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
    drain(&engine).expect("copies");
    device.pause(Lane::Download, true);
    let second = all[1].gradient(1);
    // SAFETY: as in `take`.
    unsafe { take_these(&engine, &[second]) }.expect("a gradient");
    submit(&engine, &mut all, 1, hyper).expect("a step");
    let whole = |one: &OnDevice| 0..one.held.numel;
    assert!(
        engine.wait(0, &whole(&all[0]), STREAM, SOON).expect("the first"),
        "its gradient was there"
    );
    assert!(
        !engine.wait(1, &whole(&all[1]), STREAM, WATCHED).expect("the second"),
        "its gradient was not"
    );
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
    for finishes in [false, true] {
        let mut all = [split(CHUNK_LEN, 1), split(9, 2)];
        let device = host_device(&all);
        let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1));
        let _resumed = Resumed(&device);
        take(&engine, &mut all).expect("gradients");
        device.pause(Lane::Upload, true);
        submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
        let (sender, receiver) = mpsc::channel();
        let waiting = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                let said = if finishes {
                    engine.finish(STREAM, SOON)
                } else {
                    engine.wait(1, &(5..6), STREAM, SOON)
                };
                sender.send(said).expect("a receiver");
            })
        };
        assert!(
            receiver.recv_timeout(WATCHED).is_err(),
            "the weight is not there, and the stream went on"
        );
        device.pause(Lane::Upload, false);
        assert!(receiver.recv_timeout(SOON).expect("an answer").expect("a step that works"));
        all[1].assert_uploaded();
        waiting.join().expect("no panic");
    }
}

/// The last value of an event is what a wait for it waits for, so each has one use.
#[test]
fn every_event_has_one_use() {
    let mut all = [split(CHUNK_LEN, 1), split(9, 2), split(70, 3)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    take(&engine, &mut all).expect("gradients");
    let (_, source, host) = all[0].gradient(0);
    // SAFETY: as in `take`.
    unsafe { take_parts(&engine, &vec![(source, host); 2 * IN_FLIGHT]) }.expect("parts");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    let calls = device.calls.lock().expect("no panic");
    let recorded = |lane: Lane| -> BTreeSet<usize> {
        let event_of = |&(_, call): &_| match call {
            Call::Record(on, event) if on == lane => Some(event),
            _ => None,
        };
        calls.iter().filter_map(event_of).collect()
    };
    let (down, up) = (recorded(Lane::Download), recorded(Lane::Upload));
    // Those of the segments, one for all of them, and those of the parts.
    assert_eq!((down.len(), up.len()), (3 + 1 + IN_FLIGHT, 3 + 1));
    let used = down.len() + up.len();
    assert!(down.union(&up).copied().eq(0..used), "{down:?} {up:?}");
    // The device has room for another generation, and for selected channels.
    assert_eq!(events(&all), used + 3 + 1 + 1);
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
    assert!(
        !engine.finish(STREAM, WATCHED).expect("a step that works"),
        "the last weight is still on its way"
    );
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
    drain(&engine).expect("copies");
    let before: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let hyper = Hyper::default();
    let refused = |updates: Vec<Update>, said: &str| {
        // SAFETY: as in `take`; it is refused.
        let message = unsafe { engine.submit(&updates, &mut None, STREAM) }
            .expect_err("must be refused")
            .to_string();
        assert!(message.contains(said), "{message}");
    };
    refused(vec![all[0].update(2, 1, hyper)], "tensor `2`");
    refused(vec![all[0].update(1, 1, hyper)], "elements");
    refused(vec![all[0].update(0, 1, hyper), all[0].update(0, 1, hyper)], "twice");
    refused(vec![all[0].update(0, 0, hyper)], "steps[0]");
    refused(
        vec![all[1].update(1, 1, hyper), all[0].update(0, 1, Hyper { lr: f64::NAN, ..hyper })],
        "lr",
    );
    let mut without = all[0].update(0, 1, hyper);
    without.tensor.grad = None;
    refused(vec![without], "no grad");
    let mut overlapping = all[0].update(0, 1, hyper);
    let exp_avg_sq = overlapping.tensor.moments()[1];
    overlapping.tensor = overlapping.tensor.map(|field, view| match field.part.name {
        "exp_avg" => exp_avg_sq,
        _ => view,
    });
    refused(vec![overlapping], "overlap");
    for (tensor, elements) in [(7, 0..1), (1, 3..11), (1, Range { start: 5, end: 3 })] {
        engine.wait(tensor, &elements, STREAM, WATCHED).expect_err("no such elements");
    }
    assert!(engine.wait(1, &(10..10), STREAM, WATCHED).expect("nothing to wait for"));
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
    for refused in
        [take(&engine, &mut all), submit(&engine, &mut all, 2, Hyper::default()), drain(&engine)]
    {
        assert!(refused.expect_err("must be refused").to_string().contains("still running"));
    }
    device.pause(Lane::Download, false);
    finish(&engine);
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
    const ONE: Shape<'static> = Shape { numels: &[1], generations: 1, deferral: None };
    for (name, said) in [("cuda", "cuda:N"), ("xpu:0", "xpu:0"), ("cuda:-", "cuda:-")] {
        let Err(error) = Engine::new(name, ONE, pool_of(1), Isa::SCALAR) else {
            panic!("`{name}` was taken")
        };
        assert!(matches!(&error, Error::Value(message) if message.contains(said)), "{error}");
    }
    let Err(error) = Engine::new("cuda:4095", ONE, pool_of(1), Isa::SCALAR) else {
        panic!("no such device")
    };
    assert!(matches!(error, Error::Os { .. }), "{error}");
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
