//! Several gradients in one pass: bit for bit what as many steps give, whatever the state is held
//! in, and the predicted weight what its formula says.

mod battery;

use battery::{
    Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, cases, counts,
    flushing_subnormals, hypers, is_hurried, is_same, scaled, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error,
    adam::{
        Hyper, Step,
        tensor::AdamTensor,
        through::{AHEAD_MAX, GRADS_MAX, Predicted, check, step_chunk_through},
    },
    simd::isa::Isa,
    state::chunk::{CHUNK_LEN, Chunk},
    stream::{
        BLOCK,
        element::Dtype,
        view::{Route, View},
    },
};

/// A gradient with what it is stepped with.
#[derive(Debug)]
struct Update {
    grad: Guarded,
    hyper: Hyper,
    count: u64,
}

/// What one update is drawn from, but for its gradient.
fn hypers_and_counts() -> impl Strategy<Value = Vec<(Hyper, u64)>> {
    prop::collection::vec((hypers(), counts()), 1..=GRADS_MAX)
}

/// Gradients of any dtype, each at an offset of its own.
fn updates(drawn: &[(Hyper, u64)], numel: usize, spread: Spread, draw: &mut Draw) -> Vec<Update> {
    let dtypes = [Dtype::Float32, Dtype::BFloat16, Dtype::Float16];
    let update = |&(hyper, count): &(Hyper, u64)| {
        let mut grad = Guarded::zeros(dtypes[draw.below(3)], numel, draw.below(64));
        for index in 0..numel {
            grad.set_value(index, draw.value(spread));
        }
        Update { grad, hyper, count }
    };
    drawn.iter().map(update).collect()
}

/// The states that a pass takes: every master and every codec.
fn layouts() -> Vec<Layout> {
    let has_master =
        |layout: &Layout| !matches!(layout.param, ParamKind::PlainBf16 | ParamKind::PlainF16);
    Layout::states().into_iter().filter(has_master).collect()
}

/// What the model computes with.
fn weight(held: &Held) -> &Guarded {
    held.weight_out.as_ref().unwrap_or(&held.param)
}

/// The weights of `held` with this master, rounded as it rounds them.
fn weights_of(held: &Held, master: &[f32]) -> Guarded {
    let mut rounded = held.moved(0);
    rounded.write_master(master);
    weight(&rounded).moved(0)
}

fn part(view: View, chunk: Chunk) -> View {
    view.part(chunk.range(view.numel()))
}

/// One pass over every chunk, from one tensor's memory to another's or in place; the predicted
/// weights go to `staged`.
fn pass(
    isa: Isa,
    from: Option<&mut Held>,
    to: &mut Held,
    updates: &mut [Update],
    mut staged: Option<(&mut Guarded, f32)>,
) {
    let to = to.tensor();
    let from = from.map_or(to, Held::tensor);
    for chunk in Chunk::all([to.param.numel()].into_iter()) {
        let to: Vec<View> = to.chunk(chunk.index).written().map(|(_, view)| view).collect();
        let mut to = to.into_iter();
        let route = |_, from| Route { from, to: to.next().expect("the same fields") };
        let state: AdamTensor<Route> = from.chunk(chunk.index).map(route);
        let updates: Vec<(View, Step)> = updates
            .iter_mut()
            .map(|Update { grad, hyper, count }| {
                (part(grad.view(), chunk), Step::new(hyper, *count))
            })
            .collect();
        let predicted = staged
            .as_mut()
            .map(|(weight, ahead)| Predicted { weight: part(weight.view(), chunk), ahead: *ahead });
        // SAFETY: the views are of buffers that are lent, each once.
        unsafe { step_chunk_through(isa, &state, &updates, predicted, chunk) };
    }
}

/// The same tensor after these updates, one step after the other: with fp32 moments, and as it is
/// held, coded once.
fn stepped(before: &mut Held, updates: &[Update], isa: Isa) -> (Held, Held) {
    let (exp_avg, exp_avg_sq) = before.read_moments();
    let mut full =
        Held::zeros(Layout { moments: MomentsKind::Float32, ..before.layout }, before.numel, 0);
    full.key = before.key;
    full.write_moments(&exp_avg, &exp_avg_sq, 0);
    let copy = |to: &mut Held, from: &Held| {
        to.param = from.param.moved(0);
        to.master = from.master.as_ref().map(|master| master.moved(0));
        to.trailing = from.trailing.as_ref().map(|trailing| trailing.moved(0));
        to.fingerprints = from.fingerprints.as_ref().map(|known| known.moved(0));
        to.weight_out = from.weight_out.as_ref().map(|weight| weight.moved(0));
    };
    copy(&mut full, before);
    for Update { grad, hyper, count } in updates {
        full.grad = grad.moved(0);
        full.step(isa, *count, hyper);
    }
    let mut coded = before.moved(0);
    copy(&mut coded, &full);
    let (exp_avg, exp_avg_sq) = full.read_moments();
    coded.write_moments_on(isa, &exp_avg, &exp_avg_sq, updates[updates.len() - 1].count);
    (full, coded)
}

/// Sizes around everything that a kernel counts by.
fn sizes() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 0_usize..=130, 1 => BLOCK - 1..=BLOCK + 1, 1 => 300_usize..1200]
}

proptest! {
    #![proptest_config(cases(96))]

    /// THR-1 and THR-2, on every ISA, in place and out of place, wherever the memory lies; nothing
    /// beside it is touched.
    #[test]
    fn a_pass_is_as_many_steps_coded_once(
        numel in sizes(),
        drawn in hypers_and_counts(),
        offset in 0_usize..64,
        spread in Spread::any(),
        seed: u64,
    ) {
        for layout in layouts() {
            let mut draw = Draw::new(seed);
            let mut before = Held::random(layout, numel, 0, spread, draw.bits());
            let mut updates = updates(&drawn, numel, spread, &mut draw);
            let (_, mut expected) = stepped(&mut before, &updates, widest());
            for isa in Isa::available() {
                let what = format!("{layout:?}, {} gradients on {}", updates.len(), isa.name());
                let mut in_place = before.moved(offset);
                pass(isa, None, &mut in_place, &mut updates, None);
                in_place.assert_guards();
                in_place.assert_same(&mut expected, &what);

                let (mut from, mut to) = (before.moved(3), Held::zeros(layout, numel, 0));
                to.key = before.key;
                to.grad = before.grad.moved(0);
                pass(isa, Some(&mut from), &mut to, &mut updates, None);
                to.assert_guards();
                to.assert_same(&mut expected, &format!("{what}, out of place"));
                from.assert_untouched(&before, &what);
            }
        }
    }

    /// With one gradient every codec has the bits of a step.
    #[test]
    fn a_pass_with_one_gradient_is_a_step(
        numel in sizes(),
        drawn in (hypers(), counts()),
        spread in Spread::any(),
        seed: u64,
    ) {
        for layout in layouts() {
            let mut draw = Draw::new(seed);
            let before = Held::random(layout, numel, 0, spread, draw.bits());
            let mut updates = updates(&[drawn], numel, spread, &mut draw);
            for isa in Isa::available() {
                let (mut expected, mut got) = (before.moved(0), before.moved(0));
                expected.grad = updates[0].grad.moved(0);
                expected.step(isa, drawn.1, &drawn.0);
                pass(isa, None, &mut got, &mut updates, None);
                got.grad = expected.grad.moved(0);
                got.assert_same(&mut expected, &format!("{layout:?} on {}", isa.name()));
            }
        }
    }

    /// THR-3. Betas and counts whose bias corrections are exact in double precision, so that the
    /// formula's scalars are known.
    #[test]
    fn a_predicted_weight_is_the_master_moved_on(
        numel in sizes(),
        mut drawn in hypers_and_counts(),
        betas in prop::sample::select(vec![(0.5, 0.75), (0.0, 0.5), (0.75, 0.875)]),
        count in 1_i32..=8,
        ahead in prop_oneof![Just(0.0_f32), Just(2.5), Just(AHEAD_MAX), 0.0..AHEAD_MAX],
        offset in 0_usize..64,
        spread in Spread::any(),
        seed: u64,
    ) {
        let (last, last_count) = drawn.last_mut().expect("one at least");
        (last.betas, *last_count) = (betas, count as u64);
        let hyper = *last;
        let correction =
            |beta: f64| if hyper.bias_correction { 1.0 - beta.powi(count) } else { 1.0 };
        let step_size = (hyper.lr / correction(betas.0)) as f32;
        let denom_scale = (1.0 / correction(betas.1).sqrt()) as f32;
        for layout in layouts() {
            let mut draw = Draw::new(seed);
            let mut before = Held::random(layout, numel, 0, spread, draw.bits());
            let mut updates = updates(&drawn, numel, spread, &mut draw);
            let (mut full, mut expected) = stepped(&mut before, &updates, widest());
            let (exp_avg, exp_avg_sq) = full.read_moments();
            let mut moved_on = full.read_master();
            for (index, master) in moved_on.iter_mut().enumerate() {
                let denom = exp_avg_sq[index].sqrt().mul_add(denom_scale, hyper.eps as f32);
                if ahead * step_size != 0.0 {
                    *master = (-(ahead * step_size)).mul_add(exp_avg[index] / denom, *master);
                }
            }
            let expected_weights = if ahead * step_size == 0.0 {
                weight(&expected).moved(0)
            } else {
                weights_of(&expected, &moved_on)
            };
            for isa in Isa::available() {
                let what = format!("{layout:?}, {} gradients on {}", updates.len(), isa.name());
                let mut after = before.moved(0);
                let mut staged = Guarded::zeros(weight(&after).dtype(), numel, offset);
                pass(isa, None, &mut after, &mut updates, Some((&mut staged, ahead)));
                staged.assert_guards("the predicted weight");
                after.assert_same(&mut expected, &format!("{what}, with prediction"));
                for index in 0..numel {
                    let (got, expected) = (staged.value(index), expected_weights.value(index));
                    prop_assert!(
                        is_same(got, expected),
                        "{what}: weight {index} is {got:e}, expected {expected:e}"
                    );
                }
            }
        }
    }

    #[test]
    fn flush_to_zero_on_the_calling_thread_does_not_show(
        numel in 1_usize..200,
        drawn in hypers_and_counts(),
        ahead in 0.0..AHEAD_MAX,
        seed: u64,
    ) {
        for layout in layouts() {
            let mut draw = Draw::new(seed);
            let mut before = Held::zeros(layout, numel, 0);
            let mut tiny = || -> Vec<f32> {
                (0..numel).map(|_| draw.value(Spread::Ordinary) * 1e-38).collect()
            };
            let (master, exp_avg) = (tiny(), tiny());
            let exp_avg_sq: Vec<f32> = tiny().into_iter().map(f32::abs).collect();
            before.write(&master, &exp_avg, &exp_avg_sq);
            let mut updates = updates(&drawn, numel, Spread::Ordinary, &mut draw);
            // A product with the step size that is subnormal, now and then.
            updates.last_mut().expect("one at least").hyper.lr *= 1e-38;
            let (mut plain, mut flushed) = (before.moved(0), before.moved(0));
            let weights = || Guarded::zeros(weight(&before).dtype(), numel, 0);
            let (mut expected, mut got) = (weights(), weights());
            let isa = widest();
            pass(isa, None, &mut plain, &mut updates, Some((&mut expected, ahead)));
            flushing_subnormals(|| {
                pass(isa, None, &mut flushed, &mut updates, Some((&mut got, ahead)));
            });
            flushed.assert_same(&mut plain, &format!("{layout:?} with flush-to-zero"));
            prop_assert!(got.payload() == expected.payload(), "{:?} with flush-to-zero", layout);
        }
    }
}

/// The index within the parameter is what the rounding draws from, also behind the first chunk.
#[test]
fn chunks_do_not_show() {
    let numel = if is_hurried() { CHUNK_LEN + 70 } else { 2 * CHUNK_LEN + 70 };
    let drawn: Vec<(Hyper, u64)> = (1..=scaled(3) as u64)
        .map(|count| (Hyper { lr: 1e-3 / count as f64, ..Hyper::default() }, count))
        .collect();
    for layout in layouts() {
        let mut draw = Draw::new(3);
        let mut before = Held::random(layout, numel, 0, Spread::Ordinary, draw.bits());
        let mut updates = updates(&drawn, numel, Spread::Ordinary, &mut draw);
        let (_, mut expected) = stepped(&mut before, &updates, widest());
        let mut after = before.moved(1);
        pass(widest(), None, &mut after, &mut updates, None);
        after.assert_guards();
        after.assert_same(&mut expected, &format!("{layout:?}"));
    }
}

/// THR-4.
#[test]
fn a_parameter_without_a_master_is_refused() {
    for layout in Layout::all() {
        let checked = check(3, &Held::zeros(layout, 5, 0).tensor());
        match layout.param {
            ParamKind::PlainBf16 | ParamKind::PlainF16 => match checked {
                Err(Error::Value(message)) => {
                    let said = ["tensor 3", "without a master", "hint"];
                    assert!(said.iter().all(|said| message.contains(said)), "{message}");
                }
                other => panic!("{other:?}, expected a refusal"),
            },
            _ => checked.expect("it has a master"),
        }
    }
}
