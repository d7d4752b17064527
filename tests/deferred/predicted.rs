//! Weights that run ahead along their last update.

use super::*;

/// Six steps of weights that run ahead by so much, of which the first tensor has a gradient in the
/// first only. Returns how many bytes have landed with all of them, and the bytes of that tensor.
fn landed_without_further_gradients(ahead: f32) -> (u64, u64) {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 2);
    let engine = &deferred.engine;
    let mut landed = Vec::new();
    for count in 1..=6_u64 {
        draw(&mut all, &mut expected, count);
        let takes = |index: usize| index > 0 || count == 1;
        take(engine, &all, takes).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), takes);
        submit(engine, &updates, Some(ahead)).expect("a step");
        finish(engine);
        landed.push(engine.timing().bytes_uploaded);
        if count == 1 {
            expected[0].step(widest(), count, &hyper_of(count));
        }
    }
    assert!(all[0].weight == bytes(expected[0].tensor().weight()), "it runs ahead for ever");
    let [first, others @ ..] = [0, 1, 2, 3, 4, 5].map(|index| all[index].weight.len() as u64);
    let others: u64 = others.iter().sum();
    // A turn of each group, and a step that applies all that is left: it has landed before.
    assert_eq!(landed[4..].iter().sum::<u64>(), others);
    settle(engine);
    assert_eq!(engine.timing().bytes_uploaded, others);
    (landed.iter().sum(), first)
}

#[test]
fn a_predicted_weight_without_further_gradients_becomes_the_weight() {
    let (exact, _) = landed_without_further_gradients(0.0);
    let (predicted, nbytes) = landed_without_further_gradients(2.0);
    // It lands once more, and only where it ran ahead.
    assert_eq!(predicted - exact, nbytes);
}

#[test]
fn predicted_weights_land_moved_on_along_their_last_update() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 1);
    let engine = &deferred.engine;
    let mut before: Vec<Vec<u8>> = Vec::new();
    for count in 1..=3_i32 {
        draw(&mut all, &mut expected, count as u64);
        take(engine, &all, |_| true).expect("gradients");
        // Their powers are exact.
        let hyper = Hyper { betas: (0.5, 0.75), ..hyper_of(count as u64) };
        let updates = updates(&mut all, |_| count as u64, hyper, |_| true);
        submit(engine, &updates, Some(2.5)).expect("a step");
        finish(engine);
        for (one, before) in all.iter().zip(&before) {
            assert!(one.weight == *before, "{:?}, step {count}", one.held.layout);
        }
        before.clear();
        for expected in &mut expected {
            expected.step(widest(), count as u64, &hyper);
            before.push(moved_on(expected, 2.5, count, &hyper));
        }
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}

#[test]
fn without_memory_for_predicted_weights_none_is_predicted() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_with(host, &mut all, 1, false);
    let engine = &deferred.engine;
    for count in 1..=2 {
        draw(&mut all, &mut expected, count);
        take(engine, &all, |_| true).expect("gradients");
        let updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
        let refused = submit(engine, &updates, Some(1.0)).expect_err("must be refused");
        let message = "expected 0 of an engine without memory for predicted weights";
        assert!(refused.to_string().contains(message), "{refused}");
        submit(engine, &updates, Some(0.0)).expect("a step");
        finish(engine);
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    }
    settle(engine);
    assert_stepped(&mut all, &mut expected, "settled");
}
