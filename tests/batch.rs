//! Steps over many tensors on a pool: the same bits for every pool, and nothing changed where a
//! step is refused.

mod battery;

use battery::{
    Draw, Guarded, Held, Layout, MomentsKind, ParamKind, Spread, assert_follows, cases,
    flushing_subnormals, hypers, is_hurried, pool, pool_of, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error,
    adam::{Hyper, batch::step, tensor::AdamTensor},
    grads::stats::grad_stats,
    host::{
        memory::{Buffer, BufferConfig},
        pool::Pool,
    },
    simd::isa::Isa,
    state::{
        chunk::CHUNK_LEN,
        codecs::{self, MasterKind},
        q8,
    },
    stream::{element::Dtype, view::View},
};

fn step_all(
    pool: &Pool,
    isa: Isa,
    all: &mut [Held],
    counts: &[u64],
    hyper: &Hyper,
) -> Result<(), Error> {
    let tensors: Vec<AdamTensor> = all.iter_mut().map(Held::tensor).collect();
    // SAFETY: the views are of `all`, which is lent.
    unsafe { step(pool, isa, &tensors, counts, hyper) }
}

fn moved(all: &[Held], offset: usize) -> Vec<Held> {
    all.iter().map(|held| held.moved(offset)).collect()
}

/// Tensors of every state, of sizes around a chunk.
fn mixed(spread: Spread) -> Vec<Held> {
    let sizes = if is_hurried() {
        [CHUNK_LEN + 65, 70, 1, 0, 33]
    } else {
        [CHUNK_LEN + 65, 2 * CHUNK_LEN, CHUNK_LEN - 1, 1, 0]
    };
    let state = |(index, layout): (usize, Layout)| {
        let mut held =
            Held::random(layout, sizes[index % sizes.len()], index % 5, spread, index as u64);
        held.key = index as u64;
        held
    };
    Layout::states().into_iter().enumerate().map(state).collect()
}

#[test]
fn threads_and_isas_do_not_show() {
    let before = mixed(Spread::Special);
    let counts: Vec<u64> = (1..=before.len() as u64).collect();
    let hyper = Hyper { weight_decay: 0.1, ..Hyper::default() };
    let mut expected = moved(&before, 0);
    step_all(&pool_of(1), widest(), &mut expected, &counts, &hyper).expect("a valid step");
    for workers in [1, 2, 3, 7] {
        let pool = pool_of(workers);
        for isa in Isa::available().filter(|isa| workers == 3 || *isa == widest()) {
            let mut after = moved(&before, workers);
            step_all(&pool, isa, &mut after, &counts, &hyper).expect("a valid step");
            for (after, expected) in after.iter_mut().zip(&mut expected) {
                after.assert_guards();
                let what = format!("{:?} with {workers} workers on {}", after.layout, isa.name());
                after.assert_same(expected, &what);
            }
        }
    }
}

/// Workers inherit flush-to-zero from the thread that starts them, and must not compute with it.
#[test]
fn flush_to_zero_of_whoever_made_the_pool_does_not_show() {
    let mut draw = Draw::new(6);
    let numel = CHUNK_LEN + 100;
    let mut tiny =
        || -> Vec<f32> { (0..numel).map(|_| draw.value(Spread::Ordinary) * 1e-38).collect() };
    let (master, exp_avg, grad) = (tiny(), tiny(), tiny());
    let exp_avg_sq: Vec<f32> = tiny().into_iter().map(f32::abs).collect();
    let layouts = [MomentsKind::Float32, MomentsKind::Bf16, MomentsKind::Q8]
        .map(|moments| Layout::new(ParamKind::Split, moments, Dtype::Float32));
    // A coefficient that is subnormal itself, too.
    let hyper = Hyper { eps: 1e-40, ..Hyper::default() };
    for layout in layouts {
        let mut before = Held::zeros(layout, numel, 0);
        before.write(&master, &exp_avg, &exp_avg_sq);
        before.set_grad(|index| grad[index]);
        let (mut expected, mut flushed) = (before.moved(0), before.moved(0));
        expected.step_on(&pool_of(2), widest(), 2, &hyper);
        flushing_subnormals(|| flushed.step_on(&pool_of(2), widest(), 2, &hyper));
        flushed.assert_same(&mut expected, &format!("{layout:?}"));
        expected.assert_guards();
    }
}

proptest! {
    #![proptest_config(cases(6))]

    #[test]
    fn every_chunk_follows_the_oracle(
        tail in 1_usize..200,
        hyper in hypers(),
        count in 1_u64..2000,
        seed: u64,
    ) {
        for layout in Layout::states() {
            let mut before = Held::random(layout, CHUNK_LEN + tail, 1, Spread::Ordinary, seed);
            let mut after = before.moved(2);
            after.step_on(&pool_of(2), widest(), count, &hyper);
            after.assert_guards();
            assert_follows(&mut before, &mut after, widest(), count, &hyper);
        }
    }
}

/// What the rounding draws from: the element's index within the parameter, the key and the count.
/// Not the weight, which this step's rounding does not reach.
#[test]
fn roundings_differ_between_chunks_keys_and_steps() {
    for moments in [MomentsKind::Bf16, MomentsKind::Q8] {
        let layout = Layout::new(ParamKind::Float32, moments, Dtype::Float32);
        let mut before = Held::zeros(layout, 2 * CHUNK_LEN, 0);
        let mut draw = Draw::new(8);
        let chunk = |values: Vec<f32>| [values.clone(), values].concat();
        let exp_avg = chunk(draw.values(Spread::Ordinary, CHUNK_LEN));
        let exp_avg_sq =
            chunk(draw.values(Spread::Ordinary, CHUNK_LEN).into_iter().map(f32::abs).collect());
        // Without gradient and decay, so that only the codec's rounding tells the chunks apart.
        let half = before.exp_avg.payload().len() / 2;
        before.write_moments(&exp_avg, &exp_avg_sq, 0);
        for codes in [&mut before.exp_avg, &mut before.exp_avg_sq] {
            let (first, second) = codes.payload_mut().split_at_mut(half);
            second.copy_from_slice(first);
        }
        let stepped = |key: u64, count: u64| {
            let mut after = before.moved(0);
            after.key = key;
            let hyper = Hyper { bias_correction: false, ..Hyper::default() };
            after.step(widest(), count, &hyper);
            after
        };
        let after = stepped(1, 1);
        for (name, codes) in [("exp_avg", &after.exp_avg), ("exp_avg_sq", &after.exp_avg_sq)] {
            let (first, second) = codes.payload().split_at(half);
            assert!(first != second, "{moments:?}: {name} of two chunks drew the same bits");
        }
        let values = after.param.values();
        assert_eq!(values[..CHUNK_LEN], values[CHUNK_LEN..]);
        for (what, other) in [("key", stepped(2, 1)), ("count", stepped(1, 2))] {
            assert!(
                other.exp_avg.payload() != after.exp_avg.payload(),
                "{moments:?}: another {what}, the same bits"
            );
            assert!(
                other.exp_avg_sq.payload() != after.exp_avg_sq.payload(),
                "{moments:?}: another {what}, the same bits"
            );
            assert!(other.param.payload() == after.param.payload());
        }
    }
}

/// Each tensor is stepped with its own count.
#[test]
fn counts_are_each_tensors_own() {
    let layout = Layout::new(ParamKind::Float32, MomentsKind::Float32, Dtype::Float32);
    let tensors: Vec<Held> =
        (0..3).map(|seed| Held::random(layout, 50, 0, Spread::Ordinary, seed)).collect();
    let mut together = moved(&tensors, 0);
    step_all(pool(), widest(), &mut together, &[1, 10, 1000], &Hyper::default())
        .expect("a valid step");
    for (index, count) in [1, 10, 1000].into_iter().enumerate() {
        let mut alone = tensors[index].moved(0);
        alone.step(widest(), count, &Hyper::default());
        alone.assert_same(&mut together[index], &format!("tensor {index}"));
    }
}

#[test]
fn no_tensors_and_empty_tensors_are_fine() {
    step_all(pool(), widest(), &mut [], &[], &Hyper::default()).expect("nothing to do");
    let mut empty: Vec<Held> =
        Layout::all().into_iter().map(|layout| Held::zeros(layout, 0, 0)).collect();
    let counts = vec![1; empty.len()];
    step_all(pool(), widest(), &mut empty, &counts, &Hyper::default()).expect("nothing to do");
}

/// Calls a step that must be refused, and fails where it is not, where the message does not say
/// why, or where a bit changed.
fn assert_refused(
    all: &mut [Held],
    said: &[&str],
    call: impl FnOnce(&mut [AdamTensor]) -> Result<(), Error>,
) {
    let before = moved(all, 0);
    let mut tensors: Vec<AdamTensor> = all.iter_mut().map(Held::tensor).collect();
    let error = call(&mut tensors).expect_err(&format!("must be refused: {said:?}"));
    let Error::Value(message) = &error else { panic!("{error:?}") };
    assert!(said.iter().all(|said| message.contains(said)), "`{message}` does not say {said:?}");
    let first = message.chars().next().expect("a message");
    assert!(!first.is_uppercase(), "`{message}` is no fragment");
    for (after, before) in all.iter().zip(&before) {
        after.assert_untouched(before, message);
        after.assert_guards();
    }
}

fn small() -> Vec<Held> {
    let state = |(seed, layout)| Held::random(layout, 130, 0, Spread::Special, seed as u64);
    Layout::states().into_iter().enumerate().map(state).collect()
}

#[test]
fn hyper_parameters_out_of_range_change_nothing() {
    type Spoil = fn(&mut Hyper, f64);
    let not_numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let spoils: [(&str, Spoil, &[f64]); 6] = [
        ("lr", |hyper, value| hyper.lr = value, &[]),
        ("betas[0]", |hyper, value| hyper.betas.0 = value, &[-0.1, 1.0, 1.5]),
        ("betas[1]", |hyper, value| hyper.betas.1 = value, &[-0.1, 1.0, 2.0]),
        ("eps", |hyper, value| hyper.eps = value, &[-1e-8]),
        ("weight_decay", |hyper, value| hyper.weight_decay = value, &[]),
        ("grad_scale", |hyper, value| hyper.grad_scale = value, &[]),
    ];
    let mut all = small();
    let counts = vec![1; all.len()];
    for (name, spoil, values) in spoils {
        for &value in not_numbers.iter().chain(values) {
            let mut hyper = Hyper::default();
            spoil(&mut hyper, value);
            assert_refused(&mut all, &[name, &format!("`{value}`")], |tensors| {
                // SAFETY: the views are of `all`.
                unsafe { step(pool(), widest(), tensors, &counts, &hyper) }
            });
        }
    }
    // The edges of what is allowed are allowed.
    let edge = Hyper {
        lr: -1.0,
        betas: (0.0, 0.0),
        eps: 0.0,
        weight_decay: -1.0,
        grad_scale: 0.0,
        ..Hyper::default()
    };
    step_all(pool(), widest(), &mut all, &counts, &edge).expect("a valid step");
}

#[test]
fn counts_that_do_not_fit_change_nothing() {
    let mut all = small();
    let len = all.len();
    let mut with_zero = vec![1; len];
    with_zero[len - 1] = 0;
    let bad: [(Vec<u64>, Vec<String>); 4] = [
        (vec![], vec!["`0`".to_owned(), len.to_string()]),
        (vec![1; len - 1], vec![format!("`{}`", len - 1), len.to_string()]),
        (vec![1; len + 1], vec![format!("`{}`", len + 1), len.to_string()]),
        (with_zero, vec![format!("steps[{}]", len - 1), "`0`".to_owned()]),
    ];
    for (counts, said) in bad {
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        // SAFETY: the views are of `all`.
        assert_refused(&mut all, &said, |tensors| unsafe {
            step(pool(), widest(), tensors, &counts, &Hyper::default())
        });
    }
}

#[test]
fn a_missing_gradient_changes_nothing() {
    let mut all = small();
    let counts = vec![1; all.len()];
    let last = all.len() - 1;
    assert_refused(&mut all, &[&format!("tensor {last}"), "grad"], |tensors| {
        tensors[last].grad = None;
        // SAFETY: the views are of `all`.
        unsafe { step(pool(), widest(), tensors, &counts, &Hyper::default()) }
    });
}

/// Everything that a step writes, overlapped by another tensor's parameter or gradient.
#[test]
fn overlapping_memory_changes_nothing() {
    let mut all = small();
    // One element, so that it fits over the last ones of anything.
    all.push(Held::random(
        Layout::new(ParamKind::Float32, MomentsKind::Float32, Dtype::Float32),
        1,
        0,
        Spread::Ordinary,
        0,
    ));
    let (counts, last) = (vec![1; all.len()], all.len() - 1);
    let written: Vec<usize> = all.iter_mut().map(|held| held.tensor().written().count()).collect();
    for (tensor, &places) in written[..last].iter().enumerate() {
        for place in 0..places {
            for is_grad in [false, true] {
                assert_refused(&mut all, &["overlap", "hint"], |tensors| {
                    let (_, under) = tensors[tensor].written().nth(place).expect("counted");
                    let end = under.address() + under.dtype().size() * under.numel();
                    let over =
                        View::new((end - 4) / 4 * 4, Dtype::Float32, 1).expect("a valid view");
                    *(if is_grad {
                        tensors[last].grad.as_mut().expect("it has one")
                    } else {
                        &mut tensors[last].param
                    }) = over;
                    // SAFETY: all views lie within the buffers of `all`, and a step that does not
                    // refuse runs on this thread alone.
                    unsafe { step(pool(), widest(), tensors, &counts, &Hyper::default()) }
                });
            }
        }
    }
    // The same tensor twice, and one whose gradient is its parameter.
    let counts = vec![1; all.len()];
    assert_refused(&mut all, &["overlap"], |tensors| {
        tensors[last] = tensors[0];
        // SAFETY: as above.
        unsafe { step(pool(), widest(), tensors, &counts, &Hyper::default()) }
    });
    assert_refused(&mut all, &["overlap"], |tensors| {
        tensors[0].grad = Some(tensors[0].param);
        // SAFETY: as above.
        unsafe { step(pool(), widest(), tensors, &counts, &Hyper::default()) }
    });
}

/// Gradients are only read: two tensors may share one.
#[test]
fn a_shared_gradient_is_fine() {
    let layout = Layout::new(ParamKind::Float32, MomentsKind::Float32, Dtype::Float32);
    let mut all = [
        Held::random(layout, 64, 0, Spread::Ordinary, 1),
        Held::random(layout, 64, 0, Spread::Ordinary, 2),
    ];
    let shared = all[0].grad.view();
    let mut expected = [all[0].moved(0), all[1].moved(0)];
    expected[1].grad = all[0].grad.moved(0);
    step_all(pool(), widest(), &mut expected, &[1, 1], &Hyper::default()).expect("a valid step");
    let mut tensors: Vec<AdamTensor> = all.iter_mut().map(Held::tensor).collect();
    tensors[1].grad = Some(shared);
    // SAFETY: the views are of `all`.
    unsafe { step(pool(), widest(), &tensors, &[1, 1], &Hyper::default()) }.expect("a valid step");
    for (held, expected) in all.iter().zip(&expected) {
        assert!(
            held.param.payload() == expected.param.payload()
                && held.exp_avg.payload() == expected.exp_avg.payload()
        );
    }
}

/// A step reads and writes nothing before and behind its buffers: here there are pages that no code
/// may touch.
#[test]
fn a_step_stays_within_its_pages() {
    for layout in Layout::all() {
        for (numel, isa) in [1, 15, 16, 17, 63, 64, 65, 130]
            .into_iter()
            .flat_map(|numel| Isa::available().map(move |isa| (numel, isa)))
        {
            let mut expected = Held::random(layout, numel, 0, Spread::Ordinary, numel as u64);
            let mut tensor = expected.tensor();
            let mut pages = Vec::new();
            let mut to_edge = |view: &mut View| {
                let nbytes = view.numel() * view.dtype().size();
                let page = rustix::param::page_size();
                let buffer = Buffer::new(page, &BufferConfig::default(), pool()).expect("a page");
                // At its end or, now and then, at its begin.
                let at = if pages.len() % 3 == 2 { 0 } else { page - nbytes };
                // SAFETY: both hold `nbytes` bytes, and nothing else uses the page.
                let address = unsafe {
                    let to = buffer.as_ptr().add(at);
                    to.copy_from_nonoverlapping(
                        std::ptr::with_exposed_provenance(view.address()),
                        nbytes,
                    );
                    to.expose_provenance()
                };
                *view = View::new(address, view.dtype(), view.numel()).expect("a valid view");
                pages.push(buffer);
            };
            let mut grad = tensor.grad.expect("it has one");
            to_edge(&mut grad);
            tensor = tensor.map(|_, mut view| {
                to_edge(&mut view);
                view
            });
            tensor.grad = Some(grad);
            expected.step(isa, 1, &Hyper::default());
            // SAFETY: the views are of `pages`, whole and apart.
            unsafe { step(pool(), isa, &[tensor], &[1], &Hyper::default()) }.expect("a valid step");
            // SAFETY: as above.
            unsafe { grad_stats(pool(), isa, &[tensor.grad.expect("it has one")], true) }
                .expect("a gradient");
            let nbytes = tensor.param.numel() * tensor.param.dtype().size();
            // SAFETY: the parameter's bytes, which nothing writes any more.
            let param = unsafe {
                std::slice::from_raw_parts(
                    std::ptr::with_exposed_provenance::<u8>(tensor.param.address()),
                    nbytes,
                )
            };
            assert!(
                param == expected.param.payload(),
                "{layout:?}, {numel} elements on {}",
                isa.name()
            );
        }
    }
}

/// Memory of a test's tensor, kept alive for its views.
struct Memory(Vec<Guarded>);

impl Memory {
    fn view(&mut self, dtype: Dtype, numel: usize) -> View {
        self.0.push(Guarded::zeros(dtype, numel, 0));
        self.0.last_mut().expect("pushed").view()
    }
}

/// Every layout is found from the dtypes, and what fits none is named.
#[test]
fn layouts_are_found_and_misfits_are_named() {
    use Dtype::{BFloat16, Float16, Float32, Int16, Int32, Uint8};
    for layout in Layout::all() {
        let mut held = Held::zeros(layout, 70, 0);
        let found = *held.tensor().layout();
        let master = match layout.param {
            ParamKind::Float32 | ParamKind::Float32WithBf16 | ParamKind::Float32WithF16 => {
                MasterKind::Float32
            }
            ParamKind::Split => MasterKind::Split { has_fingerprints: true },
            ParamKind::Shadowed => MasterKind::Shadowed,
            ParamKind::PlainBf16 | ParamKind::PlainF16 => MasterKind::Plain16,
        };
        let weight_out = match layout.param {
            ParamKind::Float32WithBf16 => Some(BFloat16),
            ParamKind::Float32WithF16 => Some(Float16),
            _ => None,
        };
        assert_eq!((found.master, found.weight_out), (master, weight_out), "{layout:?}");
        let moments = match layout.moments {
            MomentsKind::Float32 => codecs::MomentsKind::Float32,
            MomentsKind::Bf16 => codecs::MomentsKind::Stochastic,
            MomentsKind::Q8 => codecs::MomentsKind::Q8,
            MomentsKind::Nearest16 => codecs::MomentsKind::Nearest16,
        };
        assert_eq!(found.moments, moments, "{layout:?}");
    }

    const N: usize = 70;
    let mut memory = Memory(Vec::new());
    let mut refuse = |param: Dtype,
                      grad: Option<(Dtype, usize)>,
                      moments: [(Dtype, usize); 2],
                      beside: &[(&str, Dtype, usize)],
                      said: &[&str]| {
        let names = match moments[0].0 {
            Uint8 => ["exp_avg_codes", "exp_avg_sq_codes"],
            _ => ["exp_avg", "exp_avg_sq"],
        };
        let mut parts: Vec<(&str, View)> = names
            .into_iter()
            .zip(moments)
            .map(|(name, (dtype, numel))| (name, memory.view(dtype, numel)))
            .collect();
        let mut weight_out = None;
        for &(name, dtype, numel) in beside {
            let view = memory.view(dtype, numel);
            match name {
                "weight_out" => weight_out = Some(view),
                name => parts.push((name, view)),
            }
        }
        let grad = grad.map(|(dtype, numel)| memory.view(dtype, numel));
        let param = memory.view(param, N);
        match AdamTensor::new(param, &parts, grad, weight_out, 0) {
            Err(Error::Value(message)) => {
                assert!(
                    said.iter().all(|said| message.contains(said)),
                    "`{message}` does not say {said:?}"
                );
            }
            other => panic!("{other:?}, expected a refusal that says {said:?}"),
        }
    };
    let fp32 = [(Float32, N); 2];
    let codes = [(Uint8, q8::codes_len(N)); 2];
    let scales = q8::scales_len(N);
    for param in [Int16, Int32, Uint8] {
        refuse(param, None, fp32, &[], &["param", param.name()]);
    }
    for grad in [Int16, Int32, Uint8] {
        refuse(Float32, Some((grad, N)), fp32, &[], &["grad", grad.name()]);
    }
    refuse(Float32, Some((Float32, N - 1)), fp32, &[], &["grad", "`69`", "70"]);
    refuse(BFloat16, Some((Float32, N)), fp32, &[], &["grad", "`float32`", "bfloat16"]);
    refuse(Float16, Some((BFloat16, N)), fp32, &[], &["grad", "`bfloat16`", "float16"]);
    refuse(Float32, None, [(Float32, N + 1), (Float32, N)], &[], &["exp_avg", "`71`"]);
    refuse(Float32, None, [(Float32, N), (Float32, N - 1)], &[], &["exp_avg_sq", "`69`"]);
    refuse(Float32, None, [(Float32, N), (BFloat16, N)], &[], &["exp_avg_sq", "`bfloat16`"]);
    refuse(Float32, None, [(Float16, N); 2], &[], &["exp_avg", "`float16`"]);
    refuse(Float32, None, [(Int32, N); 2], &[], &["exp_avg", "`int32`"]);
    refuse(BFloat16, None, [(Float16, N); 2], &[], &["exp_avg", "`float16`"]);
    refuse(
        BFloat16,
        None,
        codes,
        &[("exp_avg_scales", BFloat16, scales), ("exp_avg_sq_scales", BFloat16, scales)],
        &["exp_avg", "hint"],
    );
    refuse(Float16, None, [(BFloat16, N); 2], &[], &["exp_avg", "hint"]);
    refuse(Float32, None, codes, &[], &["exp_avg_scales"]);
    refuse(Float32, None, codes, &[("exp_avg_scales", BFloat16, scales)], &["exp_avg_sq_scales"]);
    refuse(
        Float32,
        None,
        codes,
        &[("exp_avg_scales", BFloat16, scales), ("exp_avg_sq_scales", BFloat16, scales - 1)],
        &["exp_avg_sq_scales"],
    );
    refuse(
        Float32,
        None,
        codes,
        &[("exp_avg_scales", Float32, scales), ("exp_avg_sq_scales", BFloat16, scales)],
        &["exp_avg_scales", "`float32`"],
    );
    refuse(
        Float32,
        None,
        [(Uint8, N); 2],
        &[("exp_avg_scales", BFloat16, scales), ("exp_avg_sq_scales", BFloat16, scales)],
        &["exp_avg", "`70`", "128"],
    );
    refuse(Float32, None, fp32, &[("exp_avg_sq_scales", BFloat16, scales)], &["scales"]);
    for name in ["master", "trailing", "fingerprints"] {
        refuse(Float32, None, fp32, &[(name, Float32, N)], &[name, "`float32`"]);
    }
    refuse(Float32, None, fp32, &[("weight_out", Float32, N)], &["weight_out", "`float32`"]);
    refuse(Float32, None, fp32, &[("weight_out", BFloat16, N + 1)], &["weight_out", "`71`"]);
    refuse(BFloat16, None, fp32, &[("fingerprints", Int32, 1)], &["trailing", "fingerprints"]);
    refuse(
        BFloat16,
        None,
        fp32,
        &[("trailing", Int16, N - 1), ("fingerprints", Int32, 1)],
        &["trailing", "`69`"],
    );
    refuse(
        BFloat16,
        None,
        fp32,
        &[("trailing", BFloat16, N), ("fingerprints", Int32, 1)],
        &["trailing", "`bfloat16`"],
    );
    refuse(
        BFloat16,
        None,
        fp32,
        &[("trailing", Int16, N), ("fingerprints", Int32, 2)],
        &["fingerprints", "`2`"],
    );
    refuse(
        BFloat16,
        None,
        fp32,
        &[("trailing", Int16, N), ("fingerprints", Int32, 1), ("master", Float32, N)],
        &["master"],
    );
    refuse(BFloat16, None, fp32, &[("master", Float32, N)], &["master", "`bfloat16`"]);
    refuse(BFloat16, None, fp32, &[("weight_out", BFloat16, N)], &["weight_out"]);
    refuse(Float16, None, fp32, &[("master", Float32, N - 1)], &["master", "`69`"]);
    refuse(Float16, None, fp32, &[("master", Float16, N)], &["master", "`float16`"]);
    refuse(Float16, None, fp32, &[("master", Float32, N), ("trailing", Int16, N)], &["trailing"]);
    refuse(Float16, None, fp32, &[("trailing", Int16, N)], &["trailing", "`float16`"]);
}
