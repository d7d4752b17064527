//! Undoing a step: what was there comes back to within its rounding, or nothing changes.

mod battery;

use battery::{
    Draw, Held, Layout, MomentsKind, ParamKind, Spread, cases, flushing_subnormals, is_hurried,
    pool, pool_of, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error,
    adam::{Hyper, rollback::rollback},
    host::pool::Pool,
    simd::isa::Isa,
    state::chunk::CHUNK_LEN,
    stream::element::Dtype,
};

const PLAIN: Layout =
    Layout { param: ParamKind::Float32, moments: MomentsKind::Float32, grad: Dtype::Float32 };

/// Units in the last place of the largest number that was added up on the way that what comes back
/// may be off by: the roundings of the step (at most 4 each) and of the inverse.
const RESTORED_ULPS_MAX: f64 = 8.0;

fn undo_on(
    pool: &Pool,
    isa: Isa,
    all: &mut [Held],
    counts: &[u64],
    hyper: &Hyper,
) -> Result<(), Error> {
    let tensors: Vec<_> = all.iter_mut().map(Held::tensor).collect();
    // SAFETY: the views are of `all`, which is lent.
    unsafe { rollback(pool, isa, &tensors, counts, hyper) }
}

fn undo(held: &mut Held, count: u64, hyper: &Hyper) -> Result<(), Error> {
    undo_on(pool(), widest(), std::slice::from_mut(held), &[count], hyper)
}

/// A state as some steps leave it.
fn trained(numel: usize, steps: u64, hyper: &Hyper, seed: u64) -> Held {
    let mut draw = Draw::new(seed);
    let mut held = Held::zeros(PLAIN, numel, 0);
    held.write_master(&draw.values(Spread::Ordinary, numel));
    for count in 1..=steps {
        let grads = draw.values(Spread::Ordinary, numel);
        held.set_grad(|index| grads[index]);
        held.step(widest(), count, hyper);
    }
    let grads = draw.values(Spread::Ordinary, numel);
    held.set_grad(|index| grads[index]);
    held
}

fn assert_refused(held: &mut Held, count: u64, hyper: &Hyper, said: &str) {
    let before = held.moved(0);
    let error = undo(held, count, hyper).expect_err("must be refused");
    let Error::Value(message) = &error else { panic!("{error:?}") };
    assert!(message.contains(said), "`{message}` does not say `{said}`");
    held.assert_untouched(&before, message);
}

/// Hyper-parameters as people set them: those of a step that loses nothing but roundings.
fn usual() -> impl Strategy<Value = Hyper> {
    (
        (-5.0..-1.0).prop_map(|exponent| 10_f64.powf(exponent)),
        (prop_oneof![Just(0.9), 0.5..0.99], prop_oneof![Just(0.999), Just(0.95), 0.9..0.9999]),
        prop_oneof![Just(1e-8), Just(1e-6)],
        prop_oneof![Just(0.0), Just(0.01), Just(0.1)],
        prop_oneof![Just(1.0), Just(0.25), 1e-3..10.0],
        any::<[bool; 3]>(),
    )
        .prop_map(
            |(lr, betas, eps, weight_decay, grad_scale, [decoupled, bias_correction, maximize])| {
                Hyper {
                    lr,
                    betas,
                    eps,
                    weight_decay,
                    decoupled,
                    bias_correction,
                    maximize,
                    grad_scale,
                }
            },
        )
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn a_step_is_undone_to_within_its_rounding(
        numel in 1_usize..300,
        steps in 0_u64..20,
        hyper in usual(),
        seed: u64,
    ) {
        let mut held = trained(numel, steps, &hyper, seed);
        let before = held.moved(0);
        held.step(widest(), steps + 1, &hyper);
        let stepped = held.moved(0);
        let undone = undo(&mut held, steps + 1, &hyper);
        if undone.is_err() && !hyper.decoupled && hyper.weight_decay != 0.0 {
            // The gradient includes the weight, whose last places an update that was much larger
            // has taken with it.
            held.assert_untouched(&stepped, "refused");
            return Ok(());
        }
        undone.expect("an ordinary step can be undone");
        let (beta1, beta2) = hyper.betas;
        for index in 0..numel {
            let at = |of: &Held| {
                [of.param.value(index), of.exp_avg.value(index), of.exp_avg_sq.value(index)]
                    .map(f64::from)
            };
            let (was, then, now) = (at(&before), at(&stepped), at(&held));
            let denom = then[2].sqrt() + hyper.eps;
            let scaled = f64::from(before.grad.value(index)).abs() * hyper.grad_scale;
            let l2 = if hyper.decoupled { 0.0 } else { hyper.weight_decay };
            let update =
                hyper.lr / (1.0 - beta1) * (was[1].abs() + scaled + l2 * was[0].abs()) / denom;
            // The gradient includes the weight, which is off by the rounding of the update.
            let grad = scaled + l2 * was[0].abs().max(update);
            // Errors of a moment after the step are divided by its decay.
            let added = [
                update,
                ((1.0 - beta1) * grad + then[1].abs()) / beta1,
                ((1.0 - beta2) * grad * grad + then[2]) / beta2,
            ];
            for (which, name) in ["param", "exp_avg", "exp_avg_sq"].into_iter().enumerate() {
                let largest = was[which].abs().max(then[which].abs()).max(added[which]);
                let error = (now[which] - was[which]).abs();
                prop_assert!(
                    error <= RESTORED_ULPS_MAX * f64::from(f32::EPSILON) * largest,
                    "{name}[{index}] was {:e}, became {:e}, came back as {:e}",
                    was[which],
                    then[which],
                    now[which]
                );
            }
        }
        prop_assert!(held.grad.payload() == before.grad.payload());
        held.assert_guards();
    }

    /// Whatever the state and the gradient, all of it is undone or none of it.
    #[test]
    fn all_or_nothing(
        numel in 1_usize..100,
        spread in Spread::any(),
        hyper in battery::hypers(),
        count in battery::counts(),
        seed: u64,
    ) {
        let mut held = Held::random(PLAIN, numel, 0, spread, seed);
        held.step(widest(), count, &hyper);
        let stepped = held.moved(0);
        match undo(&mut held, count, &hyper) {
            Err(Error::Value(message)) => held.assert_untouched(&stepped, &message),
            Err(error) => panic!("{error:?}"),
            Ok(()) => {
                let finite = |values: Vec<f32>| values.into_iter().all(f32::is_finite);
                prop_assert!(
                    finite(held.param.values())
                        && finite(held.exp_avg.values())
                        && finite(held.exp_avg_sq.values())
                );
                prop_assert!(
                    held.exp_avg_sq.values().iter().all(|value| *value >= 0.0),
                    "exp_avg_sq below 0"
                );
            }
        }
    }
}

#[test]
fn a_step_with_a_nonfinite_gradient_stays() {
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        for at in [0, 63, 64, 1023, 1024, 2000] {
            let hyper = Hyper::default();
            let mut held = trained(2001, 3, &hyper, 1);
            held.grad.set_value(at, bad);
            held.step(widest(), 4, &hyper);
            assert_refused(&mut held, 4, &hyper, "`1` elements");
        }
    }
}

/// One element of the last tensor that cannot be undone keeps all of them.
#[test]
fn one_tensor_that_cannot_be_undone_keeps_all() {
    let hyper = Hyper::default();
    let numel = if is_hurried() { 3000 } else { CHUNK_LEN + 10 };
    let mut all: Vec<Held> = (0..3).map(|seed| trained(numel, 2, &hyper, seed)).collect();
    all.iter_mut().for_each(|held| held.step(widest(), 3, &hyper));
    all[2].grad.set_value(numel - 1, f32::NAN);
    let before: Vec<Held> = all.iter().map(|held| held.moved(0)).collect();
    let error =
        undo_on(&pool_of(2), widest(), &mut all, &[3, 3, 3], &hyper).expect_err("must be refused");
    assert!(error.to_string().contains("`1` elements"), "{error}");
    for (after, before) in all.iter().zip(&before) {
        after.assert_untouched(before, "refused");
    }
}

#[test]
fn another_gradient_count_or_setting_is_refused() {
    let hyper = Hyper { weight_decay: 0.01, ..Hyper::default() };
    let stepped = || {
        let mut held = trained(500, 3, &hyper, 9);
        held.step(widest(), 4, &hyper);
        held
    };
    // A larger gradient than that of the step leaves a negative exp_avg_sq.
    let mut held = stepped();
    held.set_grad(|_| 1e3);
    assert_refused(&mut held, 4, &hyper, "do not follow");
    // betas that forget everything cannot be undone.
    for betas in [(0.0, 0.999), (0.9, 0.0)] {
        assert_refused(&mut stepped(), 4, &Hyper { betas, ..hyper }, "betas");
    }
    // A weight that was decayed to nothing is gone.
    let mut held = trained(500, 3, &hyper, 9);
    let gone = Hyper { lr: 1.0, weight_decay: 1.0, ..hyper };
    held.step(widest(), 4, &gone);
    assert_refused(&mut held, 4, &gone, "do not follow");
    assert_refused(&mut stepped(), 0, &hyper, "steps[0]");
    assert_refused(&mut stepped(), 4, &Hyper { lr: f64::NAN, ..hyper }, "lr");
}

#[test]
fn other_layouts_and_bad_arguments_are_refused() {
    let hyper = Hyper::default();
    for layout in Layout::all().into_iter().filter(|layout| *layout != PLAIN) {
        let mut held = Held::random(layout, 70, 0, Spread::Ordinary, 4);
        held.step(widest(), 1, &hyper);
        assert_refused(&mut held, 1, &hyper, "plain float32");
    }
    let mut held = trained(70, 1, &hyper, 5);
    let before = held.moved(0);
    let mut tensor = held.tensor();
    for (tensors, counts, said) in
        [(vec![tensor], vec![1, 2], "steps"), (vec![tensor, tensor], vec![1, 1], "overlap")]
    {
        // SAFETY: the views are of `held`.
        let error = unsafe { rollback(pool(), widest(), &tensors, &counts, &hyper) }
            .expect_err("must be refused");
        assert!(error.to_string().contains(said), "{error}");
    }
    tensor.grad = None;
    // SAFETY: as above.
    let error = unsafe { rollback(pool(), widest(), &[tensor], &[1], &hyper) }
        .expect_err("must be refused");
    assert!(error.to_string().contains("tensor 0 has no grad"), "{error}");
    held.assert_untouched(&before, "refused");
    undo_on(pool(), widest(), &mut [], &[], &hyper).expect("nothing to undo");
}

/// Neither threads nor ISA nor flush-to-zero, also where `exp_avg_sq` is subnormal, or 0, or the
/// weight is subnormal.
#[test]
fn machines_do_not_show() {
    let numel = if is_hurried() { 3000 } else { 2 * CHUNK_LEN + 5 };
    for (master_unit, grad_unit, lr) in
        [(1.0, 1.0, 1e-3), (1e-19, 1e-19, 1e-3), (1e-22, 1e-22, 1e-3), (1e-38, 1.0, 1e-39)]
    {
        let hyper = Hyper { lr, weight_decay: 0.1, ..Hyper::default() };
        let mut draw = Draw::new(6);
        let mut values = |unit: f32| -> Vec<f32> {
            (0..numel).map(|_| draw.value(Spread::Ordinary) * unit).collect()
        };
        let (master, grads) = (values(master_unit), values(grad_unit));
        let mut stepped = Held::zeros(PLAIN, numel, 0);
        stepped.write_master(&master);
        stepped.set_grad(|index| grads[index]);
        stepped.step(widest(), 1, &hyper);
        let mut expected = stepped.moved(0);
        undo_on(&pool_of(1), Isa::SCALAR, std::slice::from_mut(&mut expected), &[1], &hyper)
            .expect("can be undone");
        for workers in [1, 3] {
            for isa in Isa::available() {
                let mut undone = stepped.moved(3);
                undo_on(&pool_of(workers), isa, std::slice::from_mut(&mut undone), &[1], &hyper)
                    .expect("can be undone");
                undone.assert_same(&mut expected, &format!("{workers} workers on {}", isa.name()));
            }
            let mut flushed = stepped.moved(0);
            let mut result = None;
            flushing_subnormals(|| {
                result = Some(undo_on(
                    &pool_of(workers),
                    widest(),
                    std::slice::from_mut(&mut flushed),
                    &[1],
                    &hyper,
                ));
            });
            result.expect("called").expect("can be undone");
            flushed.assert_same(
                &mut expected,
                &format!("{workers} workers with flush-to-zero, {lr:e}"),
            );
        }
    }
}
