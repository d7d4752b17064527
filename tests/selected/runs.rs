//! Steps whose selections change as they come, land late, or fail within the device.

use std::{collections::HashMap, sync::atomic::Ordering};

use stepwell::{adam::selected::Shape as Channels, device::Lane};

use super::{
    on_device::{Resumed, drain},
    *,
};

/// Some channels whose state has room in the segment's place.
fn some_of(draw: &mut Draw, one: &Selectable) -> Change {
    let shape =
        |by_columns, count| Channels { rows: one.rows, row_len: one.row_len, count, by_columns };
    let room = |by_columns| one.nbytes() / shape(by_columns, 1).nbytes();
    let by_columns = one.column_count > 0 && (room(false) == 0 || draw.below(2) == 0);
    let end = if by_columns { one.row_len } else { one.rows };
    let count_max = room(by_columns).min(end);
    // Often as many as there is room for.
    let count = if draw.below(2) == 0 { count_max } else { 1 + draw.below(count_max) };
    Change { segment: one.segment, by_columns, indices: some(draw, count, end) }
}

/// What a test knows of the selections of an engine.
#[derive(Default)]
struct Known {
    /// By segment; whether it was stepped on the device.
    held: HashMap<usize, (Selectable, Change, bool)>,
}

impl Known {
    /// The device has the last weights of all that it steps.
    fn assert_current(&self, all: &[OnDevice], expected: &mut [Held], what: &str) {
        for (one, change, is_stepped) in self.held.values() {
            if !is_stepped {
                continue;
            }
            let weight = bytes(expected[one.tensor].tensor().weight());
            let size = weight.len() / expected[one.tensor].numel;
            for at in elements(one, change) {
                let range = at * size..(at + 1) * size;
                assert!(
                    all[one.tensor].weight[range.clone()] == weight[range],
                    "{what}: element {at} of tensor {}, {change:?}",
                    one.tensor
                );
            }
        }
    }
}

/// Steps with selections, tensors without gradients, and settles as they come.
fn any_run(seed: u64, interval: usize, fraction: f64) {
    let what = format!("seed {seed}, every {interval}, {fraction} of it");
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, interval, fraction);
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let mut draw_of = Draw::new(seed);
    let mut known = Known::default();
    for step in 1..=11_u64 {
        draw(&mut all, &mut expected, seed << 16 | step);
        let is_whole = step == 1 || draw_of.below(6) == 0;
        // None: no gradient; whether it is stepped at once.
        let mut has: Vec<Option<bool>> =
            (0..all.len()).map(|_| (draw_of.below(4) > 0).then(|| draw_of.below(5) == 0)).collect();
        // Its turn comes without a gradient.
        if (4..4 + interval as u64 + 1).contains(&step) {
            has[0] = None;
        }
        let group = engine.next_group(SOON).expect("a step that works").expect("it is over");
        let may_change = |one: &&Selectable| {
            has[one.tensor].is_some()
                && (is_whole || one.group == group && has[one.tensor] == Some(false))
        };
        let mut changes = Vec::new();
        for one in selectable.iter().filter(may_change) {
            if draw_of.below(3) > 0 {
                changes.push(some_of(&mut draw_of, one));
            }
        }
        let deferred = (!is_whole).then_some(2.0);
        let hyper = hyper_of(step);
        submit(engine, &mut all, deferred, (step, hyper), |index| has[index], changes.clone())
            .expect("a step");
        for (index, one) in expected.iter_mut().enumerate() {
            if has[index].is_some() {
                one.step(widest(), step, &hyper);
            }
        }
        for (one, _, is_stepped) in known.held.values_mut() {
            *is_stepped |= has[one.tensor].is_some();
        }
        finish(engine);
        known.held.retain(|_, (one, ..)| match has[one.tensor] {
            _ if is_whole => false,
            has => has != Some(true),
        });
        known.assert_current(&all, &mut expected, &format!("{what}, step {step}"));
        for change in changes {
            let one = *selectable.iter().find(|one| one.segment == change.segment).expect("it");
            known.held.insert(one.segment, (one, change, false));
        }
        if draw_of.below(9) == 0 {
            engine.settle(STREAM).expect("a step that works");
            finish(engine);
            known.held.clear();
            assert_stepped(&mut all, &mut expected, &format!("{what}, settled at {step}"));
        }
    }
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
    assert_stepped(&mut all, &mut expected, &what);
    assert!(!engine.settle(STREAM).expect("nothing"), "there was something left");
    for (guarded, name) in
        selecting.guarded.iter().zip(["gradients", "predicted", "device", "host"])
    {
        guarded.assert_guards(name);
    }
}

#[test]
fn every_gradient_is_applied_once_whoever_steps_it() {
    for (seed, interval, fraction) in [(1, 1, 0.1), (2, 4, 0.3), (3, 3, 1.0), (4, 5, 0.02)] {
        any_run(seed, interval, fraction);
    }
}

/// A landing that is late does not overtake the weights of selected channels, and the next step
/// waits for it.
#[test]
fn weights_of_selected_channels_outlast_a_late_landing() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, 2, 0.2);
    let engine = &selecting.engine;
    let selectable: Vec<Selectable> = engine.selectable().collect();
    let mut draw_of = Draw::new(7);
    let mut known = Known::default();
    for step in 1..=8_u64 {
        draw(&mut all, &mut expected, step);
        let changes: Vec<Change> = match step {
            1 => selectable.iter().map(|one| change_of(&mut draw_of, one)).collect(),
            _ => Vec::new(),
        };
        let (deferred, hyper) = ((step > 1).then_some(2.0), hyper_of(step));
        let _resumed = Resumed(&selecting.device.host);
        selecting.device.host.pause(Lane::Upload, true);
        submit(engine, &mut all, deferred, (step, hyper), |_| Some(false), changes.clone())
            .expect("a step");
        expected.iter_mut().for_each(|one| one.step(widest(), step, &hyper));
        for change in changes {
            let one = *selectable.iter().find(|one| one.segment == change.segment).expect("it");
            known.held.insert(one.segment, (one, change, false));
        }
        if step > 1 {
            known.held.values_mut().for_each(|(_, _, is_stepped)| *is_stepped = true);
            known.assert_current(&all, &mut expected, &format!("step {step}, before its landing"));
        }
        selecting.device.host.pause(Lane::Upload, false);
        finish(engine);
        known.assert_current(&all, &mut expected, &format!("step {step}"));
    }
    engine.settle(STREAM).expect("a step that works");
    finish(engine);
    assert_stepped(&mut all, &mut expected, "late");
    drain(engine).expect("a device that works");
}

/// Some channels are stepped and some are not: the step says so, and so does all that comes after
/// it. The host's state is that of the step before.
#[test]
fn a_device_that_fails_within_a_step_fails_it_and_all_that_follow() {
    let mut all = tensors();
    let mut expected: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let selecting = selecting(&mut all, 2, 0.2);
    let engine = &selecting.engine;
    let mut draw_of = Draw::new(11);
    let changes = engine.selectable().map(|one| change_of(&mut draw_of, &one)).collect();
    draw(&mut all, &mut expected, 1);
    submit(engine, &mut all, None, (1, hyper_of(1)), |_| Some(false), changes).expect("a step");
    finish(engine);
    expected.iter_mut().for_each(|one| one.step(widest(), 1, &hyper_of(1)));
    assert_stepped(&mut all, &mut expected, "before");
    draw(&mut all, &mut expected, 2);
    selecting.device.steps_left.store(2, Ordering::Relaxed);
    let failed = submit(engine, &mut all, Some(2.0), (2, hyper_of(2)), |_| Some(false), vec![]);
    assert!(failed.expect_err("it has failed").to_string().contains("out of order"));
    selecting.device.steps_left.store(usize::MAX, Ordering::Relaxed);
    let said = |result: Result<bool, Error>| result.expect_err("it has failed").to_string();
    let later = submit(engine, &mut all, Some(2.0), (3, hyper_of(3)), |_| Some(false), vec![]);
    assert!(said(later.map(|()| true)).contains("out of order"));
    assert!(said(engine.settle(STREAM)).contains("out of order"));
    assert!(said(engine.finish(STREAM, SOON)).contains("out of order"));
    for (one, expected) in all.iter_mut().zip(&mut expected) {
        one.held.set_grad(|at| expected.grad.value(at));
        one.held.assert_same(expected, &format!("{:?}, after the failure", expected.layout));
    }
}
