//! Every gradient is applied once: of each step, of steps that a tensor misses, beside a settle.

use stepwell::offload::Owners;

use super::{on_device::witness, *};

#[test]
fn every_gradient_is_applied_once_with_the_coefficients_of_its_step() {
    for interval in [1, 3] {
        let mut all = tensors(MomentsKind::Float32);
        let mut expected = copies(&all);
        let deferred = deferred_on(host, &mut all, interval);
        let engine = &deferred.engine;
        for count in 1..=7 {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let hyper = hyper_of(count);
            let updates = updates(&mut all, |_| count, hyper, |_| true);
            submit(engine, &updates, Some(2.0)).expect("a step");
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
            assert!(engine.timing().oldest_age < interval as u64, "{:?}", engine.timing());
            expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper));
        }
        settle(engine);
        assert_stepped(&mut all, &mut expected, &format!("every {interval}"));
        assert!(!engine.settle(STREAM).expect("nothing"), "there was something left");
        deferred.gradients.assert_guards("gradients");
    }
}

#[test]
fn a_deferral_of_everything_at_once_is_an_exact_step_for_every_codec() {
    for moments in [MomentsKind::Float32, MomentsKind::Bf16, MomentsKind::Q8] {
        let mut all = tensors(moments);
        let mut expected = copies(&all);
        let deferred = deferred_on(host, &mut all, 2);
        let engine = &deferred.engine;
        for count in 1..=3 {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let mut updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
            updates.iter_mut().for_each(|update| update.is_at_once = count == 2);
            submit(engine, &updates, (count == 2).then_some(1.0)).expect("a step");
            finish(engine);
            expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
            assert_stepped(&mut all, &mut expected, &format!("step {count}"));
        }
    }
}

#[test]
fn a_tensor_may_miss_steps_and_gradients_may_be_discarded() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 4);
    let engine = &deferred.engine;
    let mut counts = vec![0; all.len()];
    for step in 1..=11_u64 {
        draw(&mut all, &mut expected, step);
        let takes = |index: usize| !(step + index as u64).is_multiple_of(3);
        take(engine, &all, takes).expect("gradients");
        if step % 4 == 0 {
            // Skipped.
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
            on_device::discard(engine);
            continue;
        }
        let hyper = hyper_of(step);
        (0..all.len()).filter(|&index| takes(index)).for_each(|index| counts[index] += 1);
        let updates = updates(&mut all, |index| counts[index], hyper, takes);
        assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        submit(engine, &updates, Some(1.5)).expect("a step");
        for index in (0..all.len()).filter(|&index| takes(index)) {
            expected[index].step(widest(), counts[index], &hyper);
        }
        assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        if step == 7 {
            settle(engine);
        }
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn gradients_of_the_next_step_are_taken_while_one_is_settled() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 2);
    let engine = &deferred.engine;
    for count in 1..=5 {
        draw(&mut all, &mut expected, count);
        // The first of them before what is pending is settled, the others after.
        take(engine, &all, |index| index < 2).expect("gradients");
        settle(engine);
        take(engine, &all, |index| index >= 2).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        submit(engine, &updates, Some(1.0)).expect("a step");
        assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn what_is_lent_stays_until_its_gradient_is_applied_and_has_landed() {
    let interval = 2;
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, interval);
    let engine = &deferred.engine;
    let mut witnesses = Vec::new();
    let dropped = |witnesses: &[Arc<std::sync::atomic::AtomicUsize>]| -> Vec<usize> {
        witnesses.iter().map(|one| one.load(Ordering::SeqCst)).collect()
    };
    for count in 1..=7 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        let (owners, witness): (Owners, _) = witness();
        witnesses.push(witness);
        // SAFETY: the tensors outlive the engine.
        unsafe { engine.submit_deferred(1.0, &updates, &mut Some(owners), STREAM) }
            .expect("a step");
        finish(engine);
        engine.returned().for_each(drop);
    }
    assert_eq!(dropped(&witnesses), [1, 1, 0, 0, 0, 0, 0]);
    settle(engine);
    engine.returned().for_each(drop);
    assert_eq!(dropped(&witnesses), [1; 7]);
}
