//! What cannot be deferred, state that moves, and memory: what it takes, and what does not fit.

use stepwell::stream::view::View;

use super::{on_device::drain, *};

#[test]
fn what_cannot_be_deferred_is_refused_with_nothing_changed() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 2);
    let engine = &deferred.engine;
    let refused = |result: Result<(), Error>| result.expect_err("must be refused").to_string();
    draw(&mut all, &mut expected, 1);
    take(engine, &all, |index| index != 2).expect("gradients");
    let mut of_all = updates(&mut all, |_| 1, hyper_of(1), |_| true);
    let message = refused(submit(engine, &of_all, Some(1.0)));
    assert!(message.contains("tensor `2` was not taken"), "{message}");
    take(engine, &all, |index| index == 2).expect("a gradient");
    for ahead in [-1.0, f32::NAN, 17.0] {
        let message = refused(submit(engine, &of_all, Some(ahead)));
        assert!(message.contains("predicted_updates"), "{message}");
    }
    submit(engine, &of_all, Some(1.0)).expect("a step");
    finish(engine);
    // Its state is elsewhere now, and gradients are pending.
    draw(&mut all, &mut expected, 2);
    take(engine, &all, |_| true).expect("gradients");
    let mut moved: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    for (update, held) in of_all.iter_mut().zip(&mut moved) {
        update.tensor = without_grad(held.tensor());
        update.count = 2;
    }
    let message = refused(submit(engine, &of_all, Some(1.0)));
    assert!(message.contains("another state"), "{message}");
    let plain = Layout::new(ParamKind::PlainBf16, MomentsKind::Float32, Dtype::BFloat16);
    let mut held = Held::random(plain, 77, 0, Spread::Ordinary, 1);
    let tensor = without_grad(held.tensor());
    let without_master = Update { index: 5, tensor, weight: None, ..of_all[5] };
    let message = refused(submit(engine, &[without_master], Some(1.0)));
    assert!(message.contains("without a master"), "{message}");
    drain(engine).expect("copies");
}

#[test]
fn state_may_move_only_when_its_weight_has_landed() {
    let mut all = tensors(MomentsKind::Float32);
    let mut expected = copies(&all);
    let deferred = deferred_on(host, &mut all, 1);
    let engine = &deferred.engine;
    let mut draw_and_take = |all: &mut [OnDevice], count| {
        draw(all, &mut expected, count);
        take(engine, all, |_| true).expect("gradients");
        expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
    };
    draw_and_take(&mut all, 1);
    let first = updates(&mut all, |_| 1, hyper_of(1), |_| true);
    submit(engine, &first, Some(0.0)).expect("a step");
    finish(engine);
    // No gradient is pending, and the device lacks the weight.
    draw_and_take(&mut all, 2);
    let mut elsewhere: Vec<Held> = all.iter().map(|one| one.held.moved(0)).collect();
    let mut second = updates(&mut all, |_| 2, hyper_of(2), |_| true);
    for (update, held) in second.iter_mut().zip(&mut elsewhere) {
        update.tensor = without_grad(held.tensor());
    }
    let message = submit(engine, &second, Some(0.0)).expect_err("must be refused").to_string();
    assert!(message.contains("another state"), "{message}");
    settle(engine);
    submit(engine, &second, Some(0.0)).expect("a step");
    settle(engine);
    for (one, held) in all.iter_mut().zip(elsewhere) {
        one.held = held;
    }
    assert_stepped(&mut all, &mut expected, "elsewhere");
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let numels = [10];
    let mut memory = Guarded::zeros(Dtype::Uint8, 1024, 0);
    let memory: View = memory.view();
    let refused = |interval, dtypes: &[Dtype], gradients, predicted| {
        let deferral = Deferral { interval, dtypes, gradients, predicted, selection: None };
        let shape = Shape { numels: &numels, generations: 2, deferral: Some(deferral) };
        let made = Engine::on(host(64), shape, Arc::new(Ram), pool_of(1), widest());
        made.err().expect("must be refused").to_string()
    };
    let one = [Dtype::BFloat16];
    assert_eq!(
        deferral_nbytes(&numels, &one, 2).expect("an interval"),
        ((3 + 2) * 64, 64),
        "shares of one place each"
    );
    let fits = memory.part(0..(3 + 2) * 64);
    let is_refused = |gradients, predicted, message| {
        let found = refused(2, &one, gradients, predicted);
        assert!(found.contains(message), "{found}");
    };
    is_refused(memory.part(0..(3 + 2) * 64 - 4), None, "gradients has");
    is_refused(memory.part(4..(3 + 2) * 64 + 4), None, "the address of gradients is");
    is_refused(fits, Some(memory.part(512..512 + 60)), "predicted has");
    is_refused(fits, Some(memory.part(516..516 + 64)), "the address of predicted is");
    assert!(refused(2, &[], fits, None).contains("dtypes"));
    assert!(refused(0, &one, fits, None).contains("interval is `0`"));
    assert!(refused(9, &one, fits, None).contains("interval is `9`"));
}

#[test]
fn groups_are_of_about_one_size() {
    let numels = [100, 10, 40];
    let dtypes = [Dtype::BFloat16, Dtype::Float32, Dtype::Float32];
    // 256 bytes, 64 and 192, with what aligns them.
    for (interval, of_gradients, of_group) in
        [(1, 2 * 512, 512), (2, 5 * 256, 256), (3, 9 * 256, 256)]
    {
        assert_eq!(
            deferral_nbytes(&numels, &dtypes, interval).expect("an interval"),
            (of_gradients, of_group)
        );
    }
}
