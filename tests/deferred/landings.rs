//! Weights that land on the device: how late, how many at once, and who waits for them.

use stepwell::offload::LANDINGS_IN_FLIGHT_MAX;

use super::{on_device::Call, *};

/// For each segment the number of the step after which it was the oracle's.
fn ages(weight: &[u8], history: &[Vec<u8>], segment_nbytes: usize) -> Vec<usize> {
    let age = |(begin, part): (usize, &[u8])| {
        let begin = begin * segment_nbytes;
        let is_then = |then: &&Vec<u8>| &then[begin..begin + part.len()] == part;
        history.iter().rev().position(|then| is_then(&then)).expect("a weight of some step")
    };
    weight.chunks(segment_nbytes).enumerate().map(age).collect()
}

#[test]
fn weights_on_the_device_are_those_of_a_step_and_no_older_than_stated() {
    let interval = 3;
    let mut all = tensors(MomentsKind::Float32);
    for one in &mut all {
        one.weight = bytes(one.held.tensor().weight());
    }
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, interval);
    let engine = &deferred.engine;
    let weights = |held: &mut Vec<Held>| -> Vec<Vec<u8>> {
        held.iter_mut().map(|one| bytes(one.tensor().weight())).collect()
    };
    let mut history = vec![weights(&mut expected)];
    let mut seen = [false; 8];
    for count in 1..=9 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        submit(engine, &updates, Some(0.0)).expect("a step");
        finish(engine);
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
        history.push(weights(&mut expected));
        for (index, one) in all.iter().enumerate().filter(|(_, one)| one.held.numel > 0) {
            let of_tensor: Vec<Vec<u8>> = history.iter().map(|then| then[index].clone()).collect();
            let size = one.weight.len() / one.held.numel;
            for age in ages(&one.weight, &of_tensor, SEGMENT_LEN * size) {
                // The turn was a step ago, and the next comes in `interval`.
                assert!(age <= interval, "`{age}` steps behind, in tensor {index}");
                seen[age] |= count > 4;
            }
        }
    }
    // Each age is there, but none: weights land a step after their turn.
    assert_eq!(seen[..5], [false, true, true, true, false]);
}

#[test]
fn ages_and_bytes_are_those_of_the_job() {
    for (interval, ages) in [(1, [0; 4]), (3, [0, 1, 1, 1])] {
        let mut all = tensors(MomentsKind::Float32);
        let mut expected = copies(&all);
        let deferred = deferred_on(host, &mut all, interval);
        let engine = &deferred.engine;
        let taken: usize = all.iter().map(|one| one.grad.len()).sum();
        let mut landed = Vec::new();
        for (count, age) in (1..).zip(ages) {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
            submit(engine, &updates, Some(0.0)).expect("a step");
            finish(engine);
            let timing = engine.timing();
            assert_eq!((timing.oldest_age, timing.bytes_downloaded), (age, taken as u64));
            landed.push(timing.bytes_uploaded);
        }
        // What has had its turn lands with the next job, so each group in turn.
        let whole: u64 = all.iter().map(|one| one.weight.len() as u64).sum();
        assert_eq!(landed[0], 0);
        assert_eq!(landed[1..=interval].iter().sum::<u64>(), whole);
        assert!(landed[1..].iter().all(|&nbytes| nbytes > 0), "{landed:?}");
        settle(engine);
        let timing = engine.timing();
        assert_eq!((timing.oldest_age, timing.bytes_downloaded), (0, 0));
        assert_eq!(timing.bytes_uploaded, whole);
    }
}

/// Weights are written on the device after what the stream held when the step was submitted.
fn assert_after_stream(gated: &Gated) {
    let calls = gated.calls.lock().expect("no panic");
    let first = |is: fn(&Call) -> bool| calls.iter().position(|(_, call)| is(call));
    let after = first(|call| matches!(call, Call::After(Lane::Upload))).expect("an order");
    let copy = first(|call| matches!(call, Call::Copy(Lane::Upload, _))).expect("an upload");
    assert!(after < copy, "{calls:?}");
}

/// More of them than land at once.
fn small_tensors() -> Vec<OnDevice> {
    let one = |seed| {
        let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
        OnDevice::new(Held::random(layout, 100, 0, Spread::Ordinary, seed))
    };
    (0..3 * LANDINGS_IN_FLIGHT_MAX as u64).map(one).collect()
}

#[test]
fn few_landings_are_with_the_device_at_once() {
    let mut all = small_tensors();
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    for count in 1..=2 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        gated.calls.lock().expect("no panic").clear();
        gated.host.pause(Lane::Upload, count == 2);
        submit(engine, &updates, Some(0.0)).expect("a step");
        if count == 1 {
            finish(engine);
        }
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    }
    let handed_over = || {
        let calls = gated.calls.lock().expect("no panic");
        calls.iter().filter(|(_, call)| matches!(call, Call::Copy(Lane::Upload, _))).count()
    };
    assert!(!engine.finish(STREAM, WATCHED).expect("a step that works"), "the uploads are late");
    assert_eq!(handed_over(), LANDINGS_IN_FLIGHT_MAX);
    assert_last_is_late(engine, &all);
    gated.host.pause(Lane::Upload, false);
    finish(engine);
    assert_eq!(handed_over(), all.len());
    assert_after_stream(&gated);
    gated.calls.lock().expect("no panic").clear();
    settle(engine);
    assert_after_stream(&gated);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn the_next_turn_is_known_when_the_step_before_has_its_own() {
    let mut all = small_tensors();
    all.truncate(3);
    let mut expected = copies(&all);
    let gated = Arc::new(Gated::with_events(256));
    let device = Arc::clone(&gated) as Arc<dyn Device>;
    let deferred = deferred_on(|_| device, &mut all, 3);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    gated.streams_wait.store(false, Ordering::Relaxed);
    for count in 1..=3 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        // The weights of the first turn land with the second step. The third one, which has been
        // submitted, does not begin before they have.
        gated.host.pause(Lane::Upload, count > 1);
        submit(engine, &updates, Some(0.0)).expect("a step");
        if count < 3 {
            let next = engine.next_group(SOON).expect("a step that works");
            assert_eq!(next, Some(count as usize));
        }
    }
    assert_eq!(engine.next_group(WATCHED).expect("a step that works"), None);
    gated.host.pause(Lane::Upload, false);
    assert_eq!(engine.next_group(SOON).expect("a step that works"), Some(0));
    finish(engine);
}

/// The weight of the last tensor is not with the device yet, and nothing stands for it.
fn assert_last_is_late(engine: &Engine, all: &[OnDevice]) {
    let last = all.len() - 1;
    let whole = 0..all[last].held.numel;
    let has_come = engine.wait(last, &whole, STREAM, WATCHED).expect("a step that works");
    assert!(!has_come, "an older weight");
}

#[test]
fn a_wait_for_a_weight_is_for_what_lands_without_a_gradient() {
    let mut all = small_tensors();
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    for count in 1..=4 {
        draw(&mut all, &mut expected, count);
        // Then predicted weights land, and then the host's own.
        let takes = |index: usize| index == 0 || count == 1 || count == 4;
        take(engine, &all, takes).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), takes);
        gated.host.pause(Lane::Upload, count == 3);
        submit(engine, &updates, Some(2.0)).expect("a step");
        if count == 3 {
            assert_last_is_late(engine, &all);
            gated.host.pause(Lane::Upload, false);
        }
        finish(engine);
        for (_, expected) in expected.iter_mut().enumerate().filter(|(at, _)| takes(*at)) {
            expected.step(widest(), count, &hyper_of(count));
        }
    }
    // All have had their turn, and none has landed.
    gated.host.pause(Lane::Upload, true);
    engine.settle(STREAM).expect("a step that works");
    assert_last_is_late(engine, &all);
    gated.host.pause(Lane::Upload, false);
    finish(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

/// Two steps of an engine with an interval of 1, whose weights run ahead by so much. The turn of
/// the second writes the memory that lands of the first: of the host's own weight, or of the
/// predicted one.
fn lands_late(mut all: Vec<OnDevice>, ahead: [f32; 2]) {
    let what = format!("{} tensors, {ahead:?}", all.len());
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    gated.streams_wait.store(false, Ordering::Relaxed);
    let hyper = Hyper { betas: (0.5, 0.75), ..hyper_of(1) };
    let mut landing: Vec<Vec<u8>> = Vec::new();
    for (count, ahead) in (1..).zip(ahead) {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper, |_| true);
        gated.host.pause(Lane::Upload, count == 2);
        submit(engine, &updates, Some(ahead)).expect("a step");
        if count == 1 {
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
            for expected in &mut expected {
                expected.step(widest(), count, &hyper);
                landing.push(match ahead {
                    0.0 => bytes(expected.tensor().weight()),
                    _ => moved_on(expected, ahead, 1, &hyper),
                });
            }
        }
    }
    assert!(!engine.finish(STREAM, WATCHED).expect("a step that works"), "the uploads are late");
    if ahead[0] == 0.0 {
        for (one, expected) in all.iter_mut().zip(&mut expected) {
            one.held.set_grad(|at| expected.grad.value(at));
            one.held.assert_same(expected, "while the last weights are on their way");
        }
    }
    gated.host.pause(Lane::Upload, false);
    finish(engine);
    for (one, landing) in all.iter().zip(&landing) {
        assert!(one.weight == *landing, "{:?}, {what}", one.held.layout);
    }
}

#[test]
fn what_lands_is_not_written_before_it_has() {
    for ahead in [[0.0, 0.0], [0.0, 2.5], [2.5, 2.5]] {
        lands_late(tensors(MomentsKind::Float32), ahead);
        // One alone, which waits for nothing else.
        lands_late(tensors(MomentsKind::Float32).split_off(5), ahead);
    }
}

#[test]
fn a_tensor_that_is_stepped_at_once_does_not_land_with_an_older_weight() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let (gated, deferred) = gated(&mut all);
    let engine = &deferred.engine;
    let _resumed = Resumed(&gated.host);
    for count in 1..=2 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let mut updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        updates[1].is_at_once = count == 2;
        if count == 2 {
            gated.host.pause(Lane::Download, true);
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
        }
        submit(engine, &updates, Some(1.0)).expect("a step");
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
        if count == 1 {
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        }
    }
    // Its gradient has not come, so neither has its weight.
    let whole = 0..all[1].held.numel;
    assert!(!engine.wait(1, &whole, STREAM, WATCHED).expect("a step that works"), "an older one");
    gated.host.pause(Lane::Download, false);
    assert!(engine.wait(1, &whole, STREAM, SOON).expect("a step that works"));
    assert!(all[1].weight == bytes(expected[1].tensor().weight()));
    finish(engine);
}
