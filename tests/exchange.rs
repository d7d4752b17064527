//! A state in fp32 and back: what state dicts, checkpoints and consolidation tools exchange.

mod battery;

use battery::{
    Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, assert_padding_is_zero, cases,
    flushing_subnormals, is_hurried, is_same, pool, pool_of, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error,
    adam::{
        exchange::{StateViews, read_state, write_state},
        tensor::AdamTensor,
    },
    host::pool::Pool,
    simd::isa::Isa,
    state::chunk::CHUNK_LEN,
    stream::{element::Dtype, view::View},
};

/// fp32 values of a master and both moments, in guarded memory.
struct Values([Guarded; 3]);

impl Values {
    fn zeros(numel: usize, offset: usize) -> Self {
        Self([(); 3].map(|()| Guarded::zeros(Dtype::Float32, numel, offset)))
    }

    fn random(numel: usize, offset: usize, spread: Spread, seed: u64) -> Self {
        let (mut draw, mut values) = (Draw::new(seed), Self::zeros(numel, offset));
        for (which, values) in values.0.iter_mut().enumerate() {
            for value in values.slice_mut::<f32>() {
                *value = draw.value(spread);
                if which == 2 {
                    *value = value.abs();
                }
            }
        }
        values
    }

    fn views(&mut self) -> StateViews {
        let [master, exp_avg, exp_avg_sq] = self.0.each_mut().map(Guarded::view);
        StateViews { master: Some(master), moments: Some((exp_avg, exp_avg_sq)) }
    }

    fn read(held: &mut Held, pool: &Pool, isa: Isa, offset: usize) -> Self {
        let (tensor, mut values) = (held.tensor(), Self::zeros(held.numel, offset));
        // SAFETY: the views are of `held` and `values`, which are lent and this function's.
        unsafe { read_state(pool, isa, &tensor, values.views()) }.expect("a valid read");
        values.0.iter().for_each(|values| values.assert_guards("the values"));
        values
    }

    fn write(&mut self, held: &mut Held, pool: &Pool, isa: Isa, count: u64) {
        let tensor = held.tensor();
        // SAFETY: as in `read`.
        unsafe { write_state(pool, isa, &tensor, count, self.views()) }.expect("a valid write");
        held.assert_guards();
    }

    fn assert_same(&self, other: &Self, what: &str) {
        for (which, (ours, theirs)) in self.0.iter().zip(&other.0).enumerate() {
            for (index, (ours, theirs)) in
                ours.slice::<f32>().iter().zip(theirs.slice::<f32>()).enumerate()
            {
                assert!(
                    is_same(*ours, *theirs),
                    "{what}: {which}[{index}] is {ours:e} against {theirs:e}"
                );
            }
        }
    }
}

/// Whether a layout holds each of master and moments in full.
fn is_exact(layout: Layout) -> (bool, bool) {
    let is_plain = matches!(layout.param, ParamKind::PlainBf16 | ParamKind::PlainF16);
    (!is_plain, layout.moments == MomentsKind::Float32)
}

proptest! {
    #![proptest_config(cases(64))]

    /// What is held in full comes back as it was; the rest is what it was rounded to, and comes
    /// back as that from then on.
    #[test]
    fn states_come_back(
        numel in 0_usize..300,
        offsets in [0_usize..64, 0_usize..64],
        spread in prop_oneof![Just(Spread::Ordinary), Just(Spread::Special)],
        count: u64,
        seed: u64,
    ) {
        for layout in Layout::states() {
            let mut given = Values::random(numel, offsets[0], spread, seed);
            let mut held = Held::zeros(layout, numel, offsets[1]);
            given.write(&mut held, pool(), widest(), count);
            let mut first = Values::read(&mut held, pool(), widest(), offsets[0]);
            let (master, moments) = is_exact(layout);
            for (which, exact) in [(0, master), (1, moments), (2, moments)] {
                for (index, (given, read)) in
                    given.0[which].values().into_iter().zip(first.0[which].values()).enumerate()
                {
                    prop_assert!(
                        !exact || is_same(given, read),
                        "{layout:?}: {which}[{index}] is {read:e} of {given:e}"
                    );
                }
            }
            if layout.moments == MomentsKind::Q8 {
                assert_padding_is_zero(&held);
            } else {
                let mut again = Held::zeros(layout, numel, 0);
                first.write(&mut again, pool(), widest(), count + 1);
                Values::read(&mut again, pool(), widest(), 0)
                    .assert_same(&first, &format!("{layout:?} again"));
                again.assert_same(&mut held, &format!("{layout:?} again"));
            }
        }
    }

    /// On every ISA, wherever the memory lies, and with flush-to-zero set.
    #[test]
    fn isas_and_alignments_do_not_show(
        numel in 0_usize..300,
        offset in 0_usize..64,
        spread in Spread::any(),
        count: u64,
        seed: u64,
    ) {
        for layout in Layout::states() {
            let mut given = Values::random(numel, 0, spread, seed);
            let mut expected = Held::zeros(layout, numel, 0);
            given.write(&mut expected, pool(), Isa::SCALAR, count);
            let expected_values = Values::read(&mut expected, pool(), Isa::SCALAR, 0);
            for isa in Isa::available() {
                let what = format!("{layout:?} on {}", isa.name());
                let mut held = Held::zeros(layout, numel, offset);
                let mut moved = Values(given.0.each_ref().map(|values| values.moved(offset)));
                moved.write(&mut held, pool(), isa, count);
                held.assert_same(&mut expected, &what);
                Values::read(&mut held, pool(), isa, offset).assert_same(&expected_values, &what);

                let mut flushed = Held::zeros(layout, numel, 0);
                let mut values = None;
                flushing_subnormals(|| {
                    moved.write(&mut flushed, pool(), isa, count);
                    values = Some(Values::read(&mut flushed, pool(), isa, 0));
                });
                flushed.assert_same(&mut expected, &format!("{what} with flush-to-zero"));
                values
                    .expect("read")
                    .assert_same(&expected_values, &format!("{what} with flush-to-zero"));
            }
        }
    }

    /// A master without moments leaves the moments, and the other way round.
    #[test]
    fn what_is_left_out_is_left_alone(numel in 1_usize..150, seed: u64) {
        for layout in Layout::states() {
            let before = Held::random(layout, numel, 0, Spread::Ordinary, seed);
            let mut given = Values::random(numel, 0, Spread::Ordinary, seed ^ 1);
            let StateViews { master, moments } = given.views();
            for from in [
                StateViews { master, moments: None },
                StateViews { master: None, moments },
                StateViews::default(),
            ] {
                let mut after = before.moved(0);
                let tensor = after.tensor();
                // SAFETY: the views are of `after` and `given`.
                unsafe { write_state(pool(), widest(), &tensor, 3, from) }.expect("a valid write");
                let is_moment = |name: &str| name.starts_with("exp_avg");
                for ((name, after), (_, before)) in after.buffers().zip(before.buffers()) {
                    let is_left = if is_moment(name) {
                        from.moments.is_none()
                    } else {
                        from.master.is_none()
                    };
                    prop_assert!(
                        !is_left || after.payload() == before.payload(),
                        "{layout:?}: {name} was changed"
                    );
                }
                let mut values = Values::zeros(numel, 0);
                let StateViews { master: to_master, moments: to_moments } = values.views();
                let to = StateViews {
                    master: from.master.and(to_master),
                    moments: from.moments.and(to_moments),
                };
                // SAFETY: as above.
                unsafe { read_state(pool(), widest(), &after.tensor(), to) }.expect("a valid read");
                prop_assert!(
                    from.master.is_some() || values.0[0].values().iter().all(|value| *value == 0.0)
                );
                prop_assert!(
                    from.moments.is_some()
                        || values.0[1].values().iter().all(|value| *value == 0.0)
                );
            }
        }
    }
}

#[test]
fn threads_do_not_show() {
    let numel = if is_hurried() { CHUNK_LEN + 65 } else { 2 * CHUNK_LEN + 65 };
    for layout in Layout::states() {
        let mut given = Values::random(numel, 0, Spread::Ordinary, 5);
        let mut expected = Held::zeros(layout, numel, 0);
        given.write(&mut expected, &pool_of(1), widest(), 9);
        let expected_values = Values::read(&mut expected, &pool_of(1), widest(), 0);
        for workers in [2, 3, 7] {
            let pool = pool_of(workers);
            let mut held = Held::zeros(layout, numel, 1);
            given.write(&mut held, &pool, widest(), 9);
            held.assert_same(&mut expected, &format!("{layout:?}, {workers} workers"));
            Values::read(&mut held, &pool, widest(), 1)
                .assert_same(&expected_values, &format!("{layout:?}, {workers} workers"));
        }
    }
}

/// The count seeds the rounding: the same one gives the same bits, another one others.
#[test]
fn the_count_seeds_the_rounding() {
    for moments in [MomentsKind::Bf16, MomentsKind::Q8] {
        let layout = Layout::new(ParamKind::Float32, moments, Dtype::Float32);
        let mut given = Values::random(500, 0, Spread::Ordinary, 1);
        let mut written = |count| {
            let mut held = Held::zeros(layout, 500, 0);
            given.write(&mut held, pool(), widest(), count);
            held
        };
        let first = written(1);
        written(1).assert_untouched(&first, "the same count");
        assert!(written(2).exp_avg.payload() != first.exp_avg.payload());
    }
}

/// Nothing is written where a view does not fit, neither to the state nor to the values.
#[test]
fn views_that_do_not_fit_change_nothing() {
    const NUMEL: usize = 100;
    for layout in Layout::states() {
        let mut held = Held::random(layout, NUMEL, 0, Spread::Special, 2);
        let before = held.moved(0);
        let tensor = held.tensor();
        let mut values = Values::random(NUMEL, 0, Spread::Ordinary, 3);
        let values_before = values.0.each_ref().map(|values| values.moved(0));
        let StateViews { master: Some(master), moments: Some((exp_avg, exp_avg_sq)) } =
            values.views()
        else {
            unreachable!("both are given")
        };
        let short = View::new(master.address(), Dtype::Float32, NUMEL - 1).expect("a valid view");
        let narrow = View::new(master.address(), Dtype::BFloat16, NUMEL).expect("a valid view");
        // One word at the end of what a step writes, seen as the end of values.
        let (_, written) = tensor.written().last().expect("a tensor writes");
        let refused = [
            (StateViews { master: Some(short), moments: None }, "`99`"),
            (StateViews { master: Some(narrow), moments: None }, "`bfloat16`"),
            (StateViews { master: Some(master), moments: Some((short, exp_avg_sq)) }, "`99`"),
            (StateViews { master: Some(master), moments: Some((exp_avg, narrow)) }, "`bfloat16`"),
        ];
        let check = |views: StateViews, said: &str, tensor: &AdamTensor| {
            for is_write in [true, false] {
                // SAFETY: all views lie within the buffers of this function.
                let result = unsafe {
                    if is_write {
                        write_state(pool(), widest(), tensor, 1, views)
                    } else {
                        read_state(pool(), widest(), tensor, views)
                    }
                };
                let Err(Error::Value(message)) = result else {
                    panic!("{layout:?}: {result:?}, expected {said}")
                };
                assert!(message.contains(said), "`{message}` does not say {said}");
                held.assert_untouched(&before, &message);
                for (after, before) in values.0.iter().zip(&values_before) {
                    assert!(after.payload() == before.payload(), "{message}");
                }
            }
        };
        for (views, said) in refused {
            check(views, said, &tensor);
        }
        // Values that lie over the state.
        let over = (written.address() + written.dtype().size() * written.numel() - 4) / 4 * 4;
        let one = View::new(over, Dtype::Float32, 1).expect("a valid view");
        let mut single = Held::random(
            Layout::new(ParamKind::Float32, MomentsKind::Float32, Dtype::Float32),
            1,
            0,
            Spread::Ordinary,
            0,
        );
        let mut over_param = single.tensor();
        over_param.param = one;
        check(StateViews { master: Some(one), moments: None }, "overlap", &over_param);
    }
    // Values that lie over each other may be read from, but not written to.
    let mut held = Held::random(
        Layout::new(ParamKind::Float32, MomentsKind::Float32, Dtype::Float32),
        NUMEL,
        0,
        Spread::Ordinary,
        2,
    );
    let mut values = Values::zeros(NUMEL, 0);
    let StateViews { master, .. } = values.views();
    let both = StateViews {
        master: None,
        moments: Some((master.expect("given"), master.expect("given"))),
    };
    let tensor = held.tensor();
    // SAFETY: as above.
    let error = unsafe { read_state(pool(), widest(), &tensor, both) }
        .expect_err("two outputs in one place");
    assert!(error.to_string().contains("overlap"), "{error}");
    // SAFETY: as above.
    unsafe { write_state(pool(), widest(), &tensor, 1, both) }.expect("both moments of zeros");
    assert_eq!(held.read_moments(), (vec![0.0; NUMEL], vec![0.0; NUMEL]));
}
