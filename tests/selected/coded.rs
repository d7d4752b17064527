//! Where the host codes moments: its state beside that of an engine without a selection, and
//! copies in fp32.

use std::collections::HashMap;

use super::*;

/// In fp32 what the device's copy of a segment has to have: it begins with the host's state.
struct Copied {
    one: Selectable,
    change: Change,
    held: Held,
    is_stepped: bool,
}

impl Copied {
    fn new(host: &mut Held, one: Selectable, change: Change) -> Self {
        let layout = Layout { moments: MomentsKind::Float32, ..host.layout };
        let mut held = Held::zeros(layout, host.numel, 0);
        let (master, (exp_avg, exp_avg_sq)) = (host.read_master(), host.read_moments());
        held.write(&master, &exp_avg, &exp_avg_sq);
        Self { one, change, held, is_stepped: false }
    }

    fn step(&mut self, grad: &Guarded, count: u64, hyper: &Hyper) {
        self.held.grad = grad.moved(0);
        self.held.step(widest(), count, hyper);
        self.is_stepped = true;
    }

    /// How many of its weights the host has rounded otherwise.
    fn num_apart(&mut self, host: &mut Held) -> usize {
        let (ours, hosts) = (bytes(self.held.tensor().weight()), bytes(host.tensor().weight()));
        let size = ours.len() / self.held.numel;
        let is_apart = |at: &usize| {
            let range = at * size..(at + 1) * size;
            ours[range.clone()] != hosts[range]
        };
        elements(&self.one, &self.change).iter().filter(|at| is_apart(at)).count()
    }

    /// The device has its weights, and some that the host has rounded otherwise.
    fn assert_current(&mut self, weights: &[u8], host: &mut Held, what: &str) -> usize {
        if !self.is_stepped {
            return 0;
        }
        let ours = bytes(self.held.tensor().weight());
        let size = ours.len() / self.held.numel;
        for at in elements(&self.one, &self.change) {
            let range = at * size..(at + 1) * size;
            assert!(
                weights[range.clone()] == ours[range],
                "{what}: element {at} of tensor {}, {:?}",
                self.one.tensor,
                self.change
            );
        }
        self.num_apart(host)
    }
}

/// What an engine has done with a segment.
#[derive(Clone, Copy, Default)]
struct Done {
    is_pending: bool,
    /// The step of its last turn, where no landing of its own has followed.
    turned_at: Option<u64>,
}

/// Where the host codes moments: its state is that of an engine without a selection, bit for bit,
/// and what forwards read of selected channels is what fp32 makes of the state that was copied.
///
/// In a calm run copies last until they have parted from the host, which takes two turns. Then a
/// turn comes with nothing to apply.
fn coded_run(
    moments: MomentsKind,
    seed: u64,
    interval: usize,
    fraction: f64,
    predicted: f32,
    is_calm: bool,
) {
    let what = format!("{moments:?}, seed {seed}, every {interval}, {fraction}, {predicted}");
    let (mut all, mut others) = (tensors_with(moments), tensors_with(moments));
    let mut drawn: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let with = selecting(&mut all, interval, fraction);
    let without = selecting(&mut others, interval, 0.0);
    let engines = [&with.engine, &without.engine];
    let selectable: Vec<Selectable> = with.engine.selectable().collect();
    let mut draw_of = Draw::new(seed);
    let mut copies: HashMap<usize, Copied> = HashMap::new();
    let mut done: HashMap<usize, Done> = HashMap::new();
    let (mut num_apart, mut num_renewed) = (0, 0);
    let turns = 2 * interval as u64;
    let num_steps = if is_calm { 2 * turns + 6 } else { 13 };
    for step in 1..=num_steps {
        let what = format!("{what}, step {step}");
        draw(&mut all, &mut drawn, seed << 16 | step);
        for (one, other) in all.iter().zip(&mut others) {
            other.grad.clone_from(&one.grad);
        }
        let is_whole = step == 1 || if is_calm { step == num_steps } else { draw_of.below(9) == 0 };
        let mut has: Vec<Option<bool>> =
            (0..all.len()).map(|_| (draw_of.below(4) > 0).then(|| draw_of.below(7) == 0)).collect();
        // Its turn comes with nothing to apply, after it was stepped.
        for (place, one) in has.iter_mut().enumerate() {
            let begin = if is_calm { 2 + turns } else { 3 } + place as u64 % 3;
            let gap = begin..begin + turns + 1;
            if gap.contains(&step) {
                *one = None;
            } else if step < gap.start {
                *one = Some(false);
            }
        }
        let group = with.engine.next_group(SOON).expect("a step that works").expect("it is over");
        let may_change = |one: &&Selectable| {
            has[one.tensor].is_some()
                && (is_whole || one.group == group && has[one.tensor] == Some(false))
        };
        let mut changes = Vec::new();
        for one in selectable.iter().filter(may_change) {
            if is_whole || draw_of.below(3) > usize::from(is_calm) {
                changes.push(change_of(&mut draw_of, one));
            }
        }
        let (deferred, hyper) = ((!is_whole).then_some(predicted), hyper_of(step));
        for (engine, all, changes) in
            [(engines[0], &mut all, changes.clone()), (engines[1], &mut others, Vec::new())]
        {
            submit(engine, all, deferred, (step, hyper), |index| has[index], changes)
                .expect("a step");
            finish(engine);
        }
        for copied in copies.values_mut() {
            if has[copied.one.tensor].is_some() {
                copied.step(&drawn[copied.one.tensor].grad, step, &hyper);
            }
        }
        copies.retain(|_, copied| !is_whole && has[copied.one.tensor] != Some(true));
        if is_whole {
            all.iter_mut().for_each(OnDevice::assert_uploaded);
        }
        for one in &selectable {
            let done = done.entry(one.segment).or_default();
            let is_turn = one.group == group;
            if is_whole || has[one.tensor] == Some(true) {
                *done = Done::default();
            } else if is_turn && (done.is_pending || has[one.tensor].is_some()) {
                *done = Done { is_pending: false, turned_at: Some(step) };
            } else if has[one.tensor].is_some() {
                done.is_pending = true;
            } else if is_turn && done.turned_at.is_some_and(|turned_at| step > turned_at + 1) {
                done.turned_at = None;
                // The host's own weight has landed, and the copy begins anew.
                if let Some(mut copied) = copies.remove(&one.segment) {
                    let host = &mut others[one.tensor].held;
                    num_renewed += usize::from(copied.num_apart(host) > 0);
                    let mut renewed = Copied::new(host, *one, copied.change);
                    renewed.is_stepped = true;
                    copies.insert(one.segment, renewed);
                }
            }
        }
        for copied in copies.values_mut() {
            let tensor = copied.one.tensor;
            let weights = &all[tensor].weight;
            num_apart += copied.assert_current(weights, &mut others[tensor].held, &what);
        }
        for change in changes {
            let one = *selectable.iter().find(|one| one.segment == change.segment).expect("it");
            let copied = Copied::new(&mut others[one.tensor].held, one, change);
            copies.insert(one.segment, copied);
        }
        if !is_calm && draw_of.below(6) == 0 || step == num_steps {
            for engine in engines {
                engine.settle(STREAM).expect("a step that works");
                finish(engine);
            }
            copies.clear();
            done.clear();
            for (one, other) in all.iter_mut().zip(&mut others) {
                one.held.assert_same(&mut other.held, &what);
                // No weight of a copy is left.
                one.assert_uploaded();
            }
        }
    }
    assert!(num_apart > 0, "{what}: no copy has parted from the host");
    assert!(num_renewed > 0 || !is_calm, "{what}: no turn came with nothing to apply");
    assert!(!with.engine.settle(STREAM).expect("nothing"), "there was something left");
    for (guarded, name) in with.guarded.iter().zip(["gradients", "predicted", "device", "host"]) {
        guarded.assert_guards(name);
    }
}

#[test]
fn coded_state_is_that_without_a_selection_and_copies_step_in_fp32() {
    coded_run(MomentsKind::Bf16, 1, 1, 0.1, 2.0, false);
    coded_run(MomentsKind::Q8, 2, 2, 1.0, 0.0, false);
    coded_run(MomentsKind::Q8, 3, 3, 0.3, 2.0, false);
    coded_run(MomentsKind::Q8, 4, 2, 0.5, 0.0, true);
}
