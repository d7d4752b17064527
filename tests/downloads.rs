//! Gradients on their way to the engine: handed to the device in order and by the engine's own
//! thread, waited for, and whole or not at all.

mod battery;
mod on_device;

use std::{
    sync::{Arc, atomic::Ordering, mpsc},
    thread,
};

use battery::Held;
use on_device::{
    Call, Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, at_once, bytes, drain, engine_on,
    finish, host_device, split, stepped, submit, take, take_parts, take_these, wait_until,
};
use stepwell::{
    adam::Hyper,
    device::{Device, Lane},
    offload::{Copies, Engine, IN_FLIGHT},
    stream::view::View,
};

/// More than the device is given copies at once, and no more than the queue of one tensor holds.
const MANY: usize = IN_FLIGHT + 64;

/// So many tensors, small ones.
fn many() -> Vec<OnDevice> {
    (0..MANY as u64).map(|seed| split(70 + seed as usize, seed)).collect()
}

/// Takes and submits on another thread, in the order given, and waits for neither.
fn step_at_once(engine: &Arc<Engine>, all: &mut [OnDevice], order: &[usize], count: u64) {
    let gradients: Vec<_> =
        all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    let updates: Vec<_> =
        order.iter().map(|&index| all[index].update(index, count, Hyper::default())).collect();
    let engine = Arc::clone(engine);
    // SAFETY: as in `take`.
    at_once(move || unsafe {
        take_these(&engine, &gradients).and_then(|()| engine.submit(&updates, &mut None, STREAM))
    })
    .expect("a step");
}

#[test]
fn nothing_is_stepped_before_the_device_has_been_given_its_copy() {
    let mut all = many();
    let device = host_device(&all);
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2));
    let _resumed = Resumed(&device);
    // The first to be stepped are the last to be copied. In the second step their events are those
    // of the first, and done.
    let order: Vec<usize> = (0..all.len()).rev().collect();
    for count in 1..=2 {
        for one in &mut all {
            one.grad.iter_mut().skip(1).step_by(2).for_each(|high| *high ^= 0x80);
        }
        let mut expected: Vec<Held> =
            all.iter().map(|one| stepped(one, count, &Hyper::default())).collect();
        device.pause(Lane::Download, true);
        step_at_once(&engine, &mut all, &order, count);
        assert!(
            !engine.wait(order[0], &(0..1), STREAM, WATCHED).expect("no failure"),
            "stepped without its gradient"
        );
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
    let mut all = [split(MANY * length, 1)];
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
    at_once(move || unsafe {
        take_parts(&stepping, &parts).and_then(|()| stepping.submit(&updates, &mut None, STREAM))
    })
    .expect("a step");
    assert!(
        !engine.wait(0, &(0..1), STREAM, WATCHED).expect("no failure"),
        "stepped without its gradient"
    );
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
        let mut expected: Vec<Held> =
            all.iter().map(|one| stepped(one, count, &Hyper::default())).collect();
        device.host.pause(Lane::Download, true);
        device.streams_wait.store(false, Ordering::Relaxed);
        device.calls.lock().expect("no panic").clear();
        step_at_once(&engine, &mut all, &order, count);
        assert!(
            !engine.release(STREAM, WATCHED).expect("no failure"),
            "the device has not been given all copies"
        );
        let is_copy = |call: &Call| matches!(call, Call::Copy(Lane::Download, _));
        let given = || {
            let calls = device.calls.lock().expect("no panic");
            calls.iter().filter(|(_, call)| is_copy(call)).count()
        };
        wait_until(|| given() >= IN_FLIGHT);
        assert!(!engine.release(STREAM, WATCHED).expect("no failure"), "not all are given");
        assert_eq!(given(), IN_FLIGHT, "copies are with the device at once");
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
fn gradients_may_be_written_before_the_step_by_what_comes_after_their_copies() {
    let mut all = many();
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    let _resumed = Resumed(&device.host);
    let order = |queued: &mut Option<Copies>, timeout| {
        engine.order_after_copies(queued, STREAM, timeout).expect("no failure")
    };
    for count in 1..=2 {
        let mut queued = None;
        assert!(order(&mut queued, SOON) && queued.is_none(), "nothing was taken");
        let mut expected: Vec<Held> =
            all.iter().map(|one| stepped(one, count, &Hyper::default())).collect();
        device.host.pause(Lane::Download, true);
        device.streams_wait.store(false, Ordering::Relaxed);
        take(&engine, &mut all).expect("gradients");
        for _ in 0..2 {
            assert!(!order(&mut queued, WATCHED), "the device has not been given all copies");
            assert!(queued.is_some());
        }
        device.streams_wait.store(true, Ordering::Relaxed);
        device.host.pause(Lane::Download, false);
        assert!(order(&mut queued, SOON), "all are there");
        all.iter_mut().for_each(|one| one.grad.fill(0x3f));
        submit(&engine, &mut all, count, Hyper::default()).expect("a step");
        finish(&engine);
        for (one, expected) in all.iter_mut().zip(&mut expected) {
            one.held.assert_same(expected, &format!("step {count}"));
        }
    }
}

#[test]
fn copies_are_handed_over_in_order_each_after_its_mark_and_by_the_engine() {
    let mut all = [split(30, 1)];
    let sources: Vec<Vec<u8>> =
        (0..MANY).map(|value| vec![value as u8; all[0].grad.len()]).collect();
    let addresses: Vec<u64> =
        sources.iter().map(|source| source.as_ptr().expose_provenance() as u64).collect();
    let device = Arc::new(Gated::new(&all));
    let engine = Arc::new(engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1));
    let _resumed = Resumed(&device.host);
    device.host.pause(Lane::Download, true);
    let (_, _, host) = all[0].gradient(0);
    let (taking, taken) = (Arc::clone(&engine), addresses.clone());
    let caller = at_once(move || {
        for source in taken {
            // SAFETY: as in `take`.
            unsafe { take_these(&taking, &[(0, source, host)]) }.expect("a gradient");
        }
        thread::current().id()
    });
    device.host.pause(Lane::Download, false);
    drain(&engine).expect("copies");
    assert_eq!(bytes(host), sources[sources.len() - 1], "the last copy is the one that counts");
    let calls = device.calls.lock().expect("no panic");
    let by =
        |is_caller: bool| calls.iter().filter(move |(thread, _)| (*thread == caller) == is_caller);
    assert!(by(true).all(|(_, call)| *call == Call::Mark), "{calls:?}");
    assert_eq!(by(true).count(), sources.len());
    let handed_over: Vec<Call> = by(false).map(|&(_, call)| call).collect();
    let download = Lane::Download;
    let each =
        |source| [Call::After(download), Call::Copy(download, source), Call::Record(download, 0)];
    assert_eq!(handed_over, addresses.into_iter().flat_map(each).collect::<Vec<_>>());
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
        assert!(take(&engine, &mut all).is_err() && drain(&engine).is_err());
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
    assert!(drain(&engine).expect_err("must fail").to_string().contains("out of order"));
    for refused in [take(&engine, &mut all), submit(&engine, &mut all, 1, Hyper::default())] {
        let message = refused.expect_err("must be refused").to_string();
        assert!(
            message.contains("copies to the host have failed") && message.contains("out of order"),
            "{message}"
        );
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
    let gradients: Vec<_> =
        all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    let (sender, receiver) = mpsc::channel();
    let dropping = thread::spawn(move || {
        // SAFETY: as in `take`.
        unsafe { take_these(&engine, &gradients) }.expect("gradients");
        drop(engine);
        sender.send(()).expect("a receiver");
    });
    assert!(
        receiver.recv_timeout(WATCHED).is_err(),
        "the memory may be freed, and copies are still to come"
    );
    device.pause(Lane::Download, false);
    receiver.recv_timeout(SOON).expect("an end");
    dropping.join().expect("no panic");
    for one in &mut all {
        assert_eq!(bytes(one.held.tensor().grad.expect("a gradient")), one.grad);
    }
}
