//! Generations: the gradients of one step. What is taken is stepped, what is discarded never is,
//! one is filled while another is stepped, and the queue of copies is bounded.

mod battery;
mod on_device;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use battery::Held;
use on_device::{
    Call, Gated, OnDevice, Resumed, SOON, STREAM, WATCHED, bytes, count, discard, drain, engine_on,
    engine_with, finish, host_device, lent, negated, split, stepped, submit, take, take_parts,
    take_these, tier::Watched, wait_until,
};
use stepwell::{
    adam::Hyper,
    device::{Device, Lane},
    error::Error,
    offload::{Engine, IN_FLIGHT, SEGMENT_LEN, Shape},
    simd::isa::Isa,
    state::chunk::CHUNK_LEN,
    stream::{element::Dtype, view::View},
    tier::{Tier, ram::Ram},
};

fn part_of(source: &[u8], host: View) -> (u64, View) {
    (source.as_ptr().expose_provenance() as u64, host)
}

// ---- taken ----

#[test]
fn a_tensor_twice_in_a_call_is_refused_and_nothing_is_queued() {
    let mut all = [split(70, 1), split(30, 2)];
    let engine = engine_on(host_device(&all), &all, 1);
    let (one, other) = (all[0].gradient(0), all[1].gradient(1));
    // SAFETY: it is refused.
    let refused = unsafe { take_these(&engine, &[one, other, one]) }.expect_err("twice");
    assert!(refused.to_string().contains("tensor `0` stands twice"), "{refused}");
    assert_eq!(engine.discard().expect("a device that works"), None);
}

#[test]
fn a_step_reads_its_gradients_as_what_they_were_taken() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let (_, source, host) = all[0].gradient(0);
    let other = View::new(host.address(), Dtype::Float16, host.numel()).expect("a view");
    // SAFETY: all memory outlives the copies, which are waited for.
    unsafe { take_these(&engine, &[(0, source, other)]) }.expect("a gradient");
    let message = submit(&engine, &mut all, 1, Hyper::default()).expect_err("another dtype");
    assert!(message.to_string().contains("memory and dtype"), "{message}");
    discard(&engine);
}

#[test]
fn a_step_reads_its_gradients_where_they_were_taken_to() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    let mut elsewhere = vec![0_u16; 70];
    let (_, source, host) = all[0].gradient(0);
    let other = View::new(elsewhere.as_mut_ptr().expose_provenance(), host.dtype(), 70);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_these(&engine, &[(0, source, other.expect("a view"))]) }.expect("a gradient");
    let message = submit(&engine, &mut all, 1, Hyper::default()).expect_err("elsewhere");
    assert!(message.to_string().contains("was taken to"), "{message}");
    discard(&engine);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
}

#[test]
fn releasing_returns_the_device_side_and_the_host_side_stays() {
    let mut all = [split(CHUNK_LEN, 1)];
    let device = Arc::new(Gated::new(&all));
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device.host);
    device.streams_wait.store(false, Ordering::Relaxed);
    device.host.pause(Lane::Download, true);
    let (mut borrowed, [sources, targets]) = lent();
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { engine.take(&[all[0].gradient(0)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets].map(count), [0, 0]);
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    assert!(engine.release(STREAM, SOON).expect("the device has all copies"));
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets].map(count), [1, 0], "the stream is ordered after the copy");
    device.host.pause(Lane::Download, false);
    finish(&engine);
    engine.returned().for_each(drop);
    assert_eq!([&*sources, &*targets].map(count), [1, 1]);
}

/// Also where they go to the same generation.
#[test]
fn releasing_returns_nothing_that_was_taken_after_the_step() {
    let mut all = [split(70, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    device.pause(Lane::Download, true);
    let (mut borrowed, dropped) = lent();
    // SAFETY: all memory outlives the copies, which are waited for.
    unsafe { engine.take(&[all[0].gradient(0)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    assert!(engine.release(STREAM, SOON).expect("the device has all copies of the step"));
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [0; 2], "they are on their way");
    device.pause(Lane::Download, false);
    discard(&engine);
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [1; 2]);
}

// ---- expected ----

/// Copies a gradient as a caller of the engine does.
fn copy(one: &mut OnDevice) {
    let grad = one.grad.clone();
    let value = |index: usize| {
        let bits = u16::from_le_bytes([grad[2 * index], grad[2 * index + 1]]);
        f32::from_bits(u32::from(bits) << 16)
    };
    one.held.set_grad(value);
}

/// Expects parts, for which there is room.
fn expect(engine: &Engine, parts: &[(usize, Range<usize>)]) -> Result<(), Error> {
    // SAFETY: the caller has copied them, and the tensors outlive the step.
    assert!(unsafe { engine.expect_parts(parts, STREAM, SOON) }?, "there is no room");
    Ok(())
}

/// Expects `early` parts of two tensors, and `late` ones behind a copy that is held up. Meanwhile
/// each tensor of `are_stepped` is stepped or is not, as it says. With the late ones the step has
/// the bits of one with all gradients.
fn assert_early_steps(
    early: &[(usize, Range<usize>)],
    late: &[(usize, Range<usize>)],
    are_stepped: &[(usize, bool)],
) {
    let mut all = [split(SEGMENT_LEN + 70, 1), split(30, 2), split(10, 3)];
    let hyper = Hyper::default();
    let mut expected = all.each_ref().map(|one| stepped(one, 1, &hyper));
    let device = host_device(&all);
    // A worker that waits holds up no other.
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 3);
    let _resumed = Resumed(&device);
    all[..2].iter_mut().for_each(copy);
    expect(&engine, early).expect("parts");
    drain(&engine).expect("copies");
    device.pause(Lane::Download, true);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_these(&engine, &[all[2].gradient(2)]) }.expect("a gradient");
    expect(&engine, late).expect("parts");
    submit(&engine, &mut all, 1, hyper).expect("a step");
    for &(index, is_stepped) in are_stepped {
        let timeout = if is_stepped { SOON } else { WATCHED };
        let found = engine.wait(index, &(0..1), STREAM, timeout).expect("a step");
        assert_eq!(found, is_stepped, "{index}");
    }
    device.pause(Lane::Download, false);
    finish(&engine);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.assert_same(expected, "the parts");
        one.assert_uploaded();
    }
}

#[test]
fn a_segment_is_stepped_when_its_parts_are_there() {
    let (whole, end) = (0..SEGMENT_LEN + 70, SEGMENT_LEN..SEGMENT_LEN + 70);
    let (begin, other) = (0..SEGMENT_LEN, 0..30);
    // In several calls, and with several parts of a segment in one.
    assert_early_steps(&[(0, whole)], &[(1, other)], &[(0, true), (1, false)]);
    let begins = [(0, begin), (1, 4..30), (1, 0..4)];
    assert_early_steps(&begins, &[(0, end)], &[(0, true), (1, true)]);
    // Its last part is late.
    let most = [(0, 0..SEGMENT_LEN), (1, 0..30)];
    let late = [(0, 7..9), (0, SEGMENT_LEN..SEGMENT_LEN + 70)];
    assert_early_steps(&most, &late, &[(0, false)]);
}

#[test]
fn a_segment_without_a_part_is_stepped_when_all_is_there() {
    let late = [(0, SEGMENT_LEN..SEGMENT_LEN + 1)];
    assert_early_steps(&[(0, 0..SEGMENT_LEN)], &late, &[(1, false)]);
}

#[test]
fn parts_that_are_taken_hold_up_those_that_are_expected() {
    let mut all = [split(70, 1), split(30, 2)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 2);
    let _resumed = Resumed(&device);
    copy(&mut all[0]);
    expect(&engine, &[(0, 0..70)]).expect("a part");
    drain(&engine).expect("copies");
    device.pause(Lane::Download, true);
    let (_, source, host) = all[1].gradient(1);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_parts(&engine, &[(source, host)]) }.expect("a part");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    // It might lie in the first tensor.
    assert!(!engine.wait(0, &(0..1), STREAM, WATCHED).expect("a step"), "stepped without a part");
    device.pause(Lane::Download, false);
    finish(&engine);
}

#[test]
fn what_was_expected_of_a_discarded_step_is_forgotten() {
    let mut all = [split(70, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    expect(&engine, &[(0, 0..70)]).expect("a part");
    discard(&engine);
    device.pause(Lane::Download, true);
    let (_, source, host) = all[0].gradient(0);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_parts(&engine, &[(source, host)]) }.expect("a part");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    assert!(!engine.wait(0, &(0..1), STREAM, WATCHED).expect("a step"), "stepped without it");
    device.pause(Lane::Download, false);
    finish(&engine);
}

#[test]
fn parts_that_the_engine_does_not_have_are_refused() {
    let all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    for (part, message) in [
        ((0, 0..71), "elements `0..71` of a tensor of 70"),
        ((0, Range { start: 3, end: 2 }), "elements `3..2` of a tensor of 70"),
        ((1, 0..1), "tensor `1`, expected one of the engine's 1"),
    ] {
        let refused = expect(&engine, &[(0, 0..1), part]).expect_err("no such elements");
        assert!(refused.to_string().contains(message), "{refused}");
    }
    assert_eq!(engine.discard().expect("a device that works"), None);
}

// ---- discarded ----

/// Takes the gradient of a step that is not taken, then that of the next in parts; whether the step
/// begins without them.
fn steps_an_abandoned_gradient(discards: bool) -> bool {
    let mut all = [split(CHUNK_LEN + 3, 1)];
    let abandoned = all[0].grad.clone();
    all[0].grad = negated(&abandoned);
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    let (_, source, host) = all[0].gradient(0);
    // SAFETY: all memory outlives the step, which is waited for.
    unsafe { take_these(&engine, &[(0, part_of(&abandoned, host).0, host)]) }.expect("a gradient");
    drain(&engine).expect("copies");
    if discards {
        discard(&engine);
    }
    device.pause(Lane::Download, true);
    // SAFETY: as above.
    unsafe { take_parts(&engine, &[(source, host)]) }.expect("a part");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let is_early = engine.wait(0, &(0..1), STREAM, WATCHED).expect("a step that works");
    device.pause(Lane::Download, false);
    finish(&engine);
    if !is_early {
        all[0].held.assert_same(&mut expected, "the part");
    }
    is_early
}

#[test]
fn a_discarded_gradient_is_never_stepped() {
    assert!(!steps_an_abandoned_gradient(true), "stepped with a gradient of the step before");
}

#[test]
fn a_part_is_waited_for_also_where_a_whole_gradient_was_taken_before() {
    assert!(!steps_an_abandoned_gradient(false), "stepped without a part that was taken");
}

#[test]
fn discarding_waits_for_the_copies_and_returns_what_was_lent() {
    let mut all = [split(70, 1), split(30, 2)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    assert_eq!(engine.discard().expect("nothing to discard"), None);
    device.pause(Lane::Download, true);
    // More than the device is given at once: the event behind them is not recorded yet.
    let gradients: Vec<_> = (0..IN_FLIGHT + 4).map(|_| all[0].gradient(0)).collect();
    let (mut first, dropped) = lent();
    // SAFETY: all memory outlives the copies, which are waited for.
    unsafe {
        for gradient in &gradients {
            assert!(engine.take(&[*gradient], &mut first, STREAM, SOON).expect("a gradient"));
        }
    }
    assert!(first.is_none(), "what is lent is taken");
    let discarded = engine.discard().expect("a device that works").expect("a gradient was taken");
    let is_over = || engine.wait_discarded(discarded, WATCHED).expect("a device that works");
    assert!(!is_over(), "copies are on their way");
    assert_eq!(engine.returned().count(), 0);
    // The one that follows is of another step, and is not discarded by the call that waits on.
    let (mut second, kept) = lent();
    // SAFETY: as above.
    unsafe { engine.take(&[all[1].gradient(1)], &mut second, STREAM, SOON) }.expect("a gradient");
    device.pause(Lane::Download, false);
    submit(&engine, &mut all[1..], 1, Hyper::default()).expect_err("tensor 0 has another size");
    drain(&engine).expect("copies");
    engine.returned().for_each(drop);
    assert_eq!([&dropped, &kept].map(|both| [count(&both[0]), count(&both[1])]), [[1; 2]; 2]);
}

/// A wait for a discard ended before the copies had, by Ctrl-C for one.
#[test]
fn what_is_taken_after_a_discard_that_was_not_waited_for_is_stepped() {
    let mut all = [split(70, 1)];
    let abandoned = all[0].grad.clone();
    all[0].grad = negated(&abandoned);
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    let (_, source, host) = all[0].gradient(0);
    device.pause(Lane::Download, true);
    // More than the device is given at once: the event behind them is not recorded yet.
    for _ in 0..IN_FLIGHT + 4 {
        // SAFETY: all memory outlives the copies, which are waited for.
        unsafe { take_these(&engine, &[(0, part_of(&abandoned, host).0, host)]) }.expect("one");
    }
    let discarded = engine.discard().expect("a device that works").expect("gradients were taken");
    assert!(!engine.wait_discarded(discarded, WATCHED).expect("copies are on their way"));
    assert_eq!(engine.discard().expect("a device that works"), Some(discarded), "still the same");
    let (mut borrowed, dropped) = lent();
    // SAFETY: as above.
    unsafe { engine.take(&[(0, source, host)], &mut borrowed, STREAM, SOON) }.expect("a gradient");
    device.pause(Lane::Download, false);
    // The wait that goes on is for the old copies, and returns nothing of the new ones.
    assert!(engine.wait_discarded(discarded, SOON).expect("copies"));
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [0; 2]);
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    assert_eq!(engine.discard().expect("a device that works"), None, "its memory is the step's");
    finish(&engine);
    all[0].held.assert_same(&mut expected, "the gradient that was taken last");
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [1; 2]);
}

#[test]
fn what_was_discarded_leaves_no_bytes_behind() {
    let mut all = [split(70, 1)];
    let engine = engine_on(host_device(&all), &all, 1);
    for _ in 0..3 {
        take(&engine, &mut all).expect("a gradient");
        discard(&engine);
    }
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    assert_eq!(engine.timing().bytes_downloaded, 140);
}

// ---- two generations ----

#[test]
fn one_generation_is_filled_while_the_other_is_stepped() {
    let mut all = [split(CHUNK_LEN + 5, 1), split(9, 2)];
    let hyper = Hyper::default();
    let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, 1, &hyper)).collect();
    let tier = Arc::new(Watched::default());
    let device = Arc::new(Gated::new(&all));
    let on = Arc::clone(&device) as Arc<dyn Device>;
    let engine = engine_with(on, &all, 2, Arc::clone(&tier) as Arc<dyn Tier>, 2);
    tier.hold(true);
    take(&engine, &mut all).expect("gradients");
    submit(&engine, &mut all, 1, hyper).expect("a step");

    // The second generation: other memory on both sides.
    let seconds: Vec<Vec<u8>> = all.iter().map(|one| negated(&one.grad)).collect();
    let mut hosts: Vec<Vec<u16>> = all.iter().map(|one| vec![0; one.held.numel]).collect();
    let mut gradients = Vec::new();
    for (index, (source, host)) in seconds.iter().zip(&mut hosts).enumerate() {
        let dtype = all[index].held.tensor().grad.expect("a gradient").dtype();
        let host = View::new(host.as_mut_ptr().expose_provenance(), dtype, host.len());
        gradients.push((index, source.as_ptr().expose_provenance() as u64, host.expect("a view")));
    }
    // SAFETY: all memory outlives the steps, which are waited for.
    unsafe { take_these(&engine, &gradients) }.expect("the other generation is free");
    // What is recorded after the last copy is behind it.
    wait_until(|| {
        let calls = device.calls.lock().expect("no panic");
        let is_copy = |call: Call| matches!(call, Call::Copy(Lane::Download, _));
        let is_record = |call: Call| matches!(call, Call::Record(Lane::Download, _));
        let mut latest = calls.iter().rev().take_while(|(_, call)| !is_copy(*call));
        calls.iter().filter(|(_, call)| is_copy(*call)).count() == 2 * gradients.len()
            && latest.any(|(_, call)| is_record(*call))
    });
    device.host.drain().expect("copies that work");
    for (&(_, _, host), source) in gradients.iter().zip(&seconds) {
        assert!(bytes(host) == *source, "the second generation is there");
    }
    assert!(engine.is_busy(), "the first step is held");
    let refused = submit(&engine, &mut all, 2, hyper).expect_err("one step at a time");
    assert!(refused.to_string().contains("still running"), "{refused}");
    tier.hold(false);
    finish(&engine);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.assert_same(expected, "the first generation");
    }

    for (one, second) in all.iter_mut().zip(&seconds) {
        one.grad.clone_from(second);
    }
    let mut expected: Vec<Held> = all.iter().map(|one| stepped(one, 2, &hyper)).collect();
    let update = |index: usize| {
        let mut update = all[index].update(index, 2, hyper);
        update.tensor.grad = Some(gradients[index].2);
        update
    };
    let updates: Vec<_> = (0..gradients.len()).map(update).collect();
    // SAFETY: as above.
    unsafe { engine.submit(&updates, &mut None, STREAM) }.expect("a step");
    finish(&engine);
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.set_grad(|_| 0.0);
        expected.set_grad(|_| 0.0);
        one.held.assert_same(expected, "the second generation");
        one.assert_uploaded();
    }
}

/// A wait for a discard ended early, and the other generation is discarded after it.
#[test]
fn waiting_for_a_discard_returns_what_both_generations_had_discarded_before() {
    let mut all = [split(70, 1)];
    let tier = Arc::new(Watched::default());
    let engine = engine_with(host_device(&all), &all, 2, Arc::clone(&tier) as Arc<dyn Tier>, 2);
    tier.hold(true);
    take(&engine, &mut all).expect("gradients");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let mut other = vec![0_u16; 70];
    let (_, source, host) = all[0].gradient(0);
    let there = View::new(other.as_mut_ptr().expose_provenance(), host.dtype(), 70);
    let there = there.expect("a view");
    let take_lent = |target: View| {
        let (mut lent, dropped) = lent();
        // SAFETY: all memory outlives the engine.
        unsafe { engine.take(&[(0, source, target)], &mut lent, STREAM, SOON) }.expect("one");
        dropped
    };
    let discard = || engine.discard().expect("a device").expect("a gradient was taken");
    let counts = |dropped: [&[Arc<AtomicUsize>; 2]; 2]| {
        engine.returned().for_each(drop);
        dropped.map(|both| [count(&both[0]), count(&both[1])])
    };
    let seconds = take_lent(there);
    let second = discard();
    tier.hold(false);
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    let firsts = take_lent(host);
    let first = discard();
    assert_ne!(first, second);
    // The earlier discard is waited for, and nothing of the later one comes back.
    assert!(engine.wait_discarded(second, SOON).expect("copies"));
    assert_eq!(counts([&firsts, &seconds]), [[0; 2], [1; 2]]);
    assert_eq!(engine.discard().expect("a device"), Some(first), "it is still to be waited for");
    assert!(engine.wait_discarded(first, SOON).expect("copies"));
    assert_eq!(counts([&firsts, &seconds]), [[1; 2], [1; 2]]);

    // The same, and the later discard alone is waited for.
    tier.hold(true);
    submit(&engine, &mut all, 2, Hyper::default()).expect("a step");
    let seconds = take_lent(there);
    discard();
    tier.hold(false);
    assert!(engine.finish(STREAM, SOON).expect("a step that works"));
    let firsts = take_lent(host);
    assert!(engine.wait_discarded(discard(), SOON).expect("copies"));
    assert_eq!(counts([&firsts, &seconds]), [[1; 2], [1; 2]]);
    assert_eq!(engine.discard().expect("a device"), None);
}

#[test]
fn the_only_generation_is_not_filled_while_it_is_stepped() {
    let mut all = [split(70, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    take(&engine, &mut all).expect("a gradient");
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    let refused = take(&engine, &mut all).expect_err("it is read").to_string();
    assert!(refused.contains("one generation") && refused.contains("hint"), "{refused}");
    // There is nothing to discard, and the step is not disturbed.
    assert_eq!(engine.discard().expect("nothing"), None);
    let mut expected = stepped(&all[0], 1, &Hyper::default());
    device.pause(Lane::Download, false);
    finish(&engine);
    all[0].held.assert_same(&mut expected, "the step");
}

#[test]
fn no_or_many_generations_are_refused() {
    for generations in [0, 3] {
        let shape = Shape { numels: &[1], generations, deferral: None };
        let Err(error) = Engine::new("cpu", shape, battery::pool_of(1), Isa::SCALAR) else {
            panic!("`{generations}` were taken")
        };
        assert!(error.to_string().contains(&format!("`{generations}`")), "{error}");
    }
}

// ---- bounds ----

#[test]
fn a_full_queue_takes_a_call_whole_or_not_at_all() {
    let mut all = [split(30, 1)];
    let device = host_device(&all);
    let engine = engine_on(Arc::clone(&device) as Arc<dyn Device>, &all, 1);
    let _resumed = Resumed(&device);
    device.pause(Lane::Download, true);
    let gradient = all[0].gradient(0);
    let mut taken = 0;
    // The thread that hands copies over may make room until the device has as many as it takes, so
    // the first call that finds none is the one that is looked at.
    let (mut last, dropped) = loop {
        let (mut borrowed, dropped) = lent();
        // SAFETY: all memory outlives the copies, which are waited for.
        let queued = unsafe { engine.take(&[gradient], &mut borrowed, STREAM, WATCHED) };
        if !queued.expect("a device") {
            break (borrowed, dropped);
        }
        taken += 1;
        assert!(taken < 10_000, "the queue is not bounded");
    };
    assert!(taken > 20 && last.is_some(), "what is not queued is not taken");
    // What is announced can still be stepped, or discarded.
    let discarded = engine.discard().expect("a device").expect("a gradient was taken");
    assert!(!engine.wait_discarded(discarded, WATCHED).expect("copies are on their way"));
    device.pause(Lane::Download, false);
    discard(&engine);
    // SAFETY: as above.
    assert!(unsafe { engine.take(&[gradient], &mut last, STREAM, SOON) }.expect("room"));
    submit(&engine, &mut all, 1, Hyper::default()).expect("a step");
    finish(&engine);
    engine.returned().for_each(drop);
    assert_eq!([&*dropped[0], &*dropped[1]].map(count), [1, 1]);
}

/// How many places the queue has; takes as many copies as there may be.
fn places(tensors: u64, generations: usize) -> usize {
    let mut all: Vec<_> = (0..tensors).map(|seed| split(30, seed)).collect();
    let engine = engine_with(host_device(&all), &all, generations, Arc::new(Ram), 1);
    let (_, source, host) = all[0].gradient(0);
    // SAFETY: all memory outlives the copies, which are waited for.
    let take = |copies| unsafe { take_parts(&engine, &vec![(source, host); copies]) };
    let message = take(10_000).expect_err("too many").to_string();
    assert!(message.contains("`10003` copies") && message.contains("hint"), "{message}");
    let (_, most) = message.split_once("at most ").expect("how many there may be");
    let places: usize = most.lines().next().expect("a number").parse().expect("a number");
    // A mark and two events take three places.
    take(places - 2).expect_err("one too many");
    take(places - 3).expect("as many as there are places");
    drain(&engine).expect("copies");
    places
}

#[test]
fn more_copies_than_the_queue_has_places_are_refused() {
    let least = places(1, 1);
    assert_eq!([places(3, 1), places(1, 2), places(3, 2)], [least + 2, least + 1, least + 5]);
}
