//! Steps out of place: committed, the bits of steps in place; reverted, none at all; refused,
//! nothing changed.

mod battery;

use battery::{
    Draw, Held, Layout, MomentsKind, ParamKind, Spread, cases, hypers, is_hurried, pool, pool_of,
    scaled, widest,
};
use proptest::prelude::*;
use stepwell::{
    Error,
    adam::{Hyper, tensor::AdamTensor},
    host::pool::Pool,
    simd::isa::Isa,
    state::chunk::{CHUNK_LEN, num_chunks},
    stream::{element::Dtype, view::View},
    tier::revocable::{HostSlots, Revocable},
};

fn tensors(all: &mut [Held]) -> Vec<AdamTensor> {
    all.iter_mut().map(Held::tensor).collect()
}

fn moved(all: &[Held], offset: usize) -> Vec<Held> {
    all.iter().map(|held| held.moved(offset)).collect()
}

fn slots_for(all: &mut [Held], spares: usize) -> HostSlots {
    HostSlots::new(&tensors(all), spares, pool()).expect("slots")
}

/// Steps the tensors of these numbers, with the counts of the same places.
fn step(
    revocable: &mut Revocable<'_>,
    (pool, isa): (&Pool, Isa),
    all: &mut [Held],
    numbers: &[usize],
    counts: &[u64],
    hyper: &Hyper,
) -> Result<(), Error> {
    let tensors: Vec<(usize, AdamTensor)> =
        numbers.iter().map(|&number| (number, all[number].tensor())).collect();
    // SAFETY: the views are of `all`, which is lent; nothing reads what is in spares before it is
    // copied home
    // but to see that it is as it was.
    unsafe { revocable.step(pool, isa, &tensors, counts, hyper) }
}

fn copy_home(slots: &mut HostSlots, pool: &Pool, all: &mut [Held]) {
    let tensors = tensors(all);
    // SAFETY: as in `step`.
    unsafe { slots.copy_home(pool, &tensors) }.expect("the tensors of these slots");
    assert_eq!(slots.num_in_spares(), 0);
}

fn assert_equal(all: &[Held], expected: &[Held], what: &str) {
    for (held, expected) in all.iter().zip(expected) {
        held.assert_untouched(
            expected,
            &format!("{what}: {:?}, {} elements", held.layout, held.numel),
        );
        held.assert_guards();
    }
}

/// Every master with every codec, of sizes around a chunk; in memory that is streamed to, and not.
#[test]
fn a_committed_step_is_one_in_place_and_a_reverted_step_is_none() {
    let sizes: &[usize] = if is_hurried() {
        &[1, 70, CHUNK_LEN + 65]
    } else {
        &[1, 16, 70, CHUNK_LEN - 1, CHUNK_LEN, CHUNK_LEN + 65, 2 * CHUNK_LEN]
    };
    let hyper = Hyper { weight_decay: 0.1, ..Hyper::default() };
    let other = Hyper { lr: 0.5, betas: (0.5, 0.5), ..Hyper::default() };
    for (seed, layout) in Layout::states().into_iter().enumerate() {
        for &numel in sizes {
            let offset = seed % 3;
            let before = [Held::random(layout, numel, offset, Spread::Special, seed as u64)];
            let (mut all, mut expected) = (moved(&before, offset), moved(&before, offset));
            let chunks = num_chunks(numel);
            let mut slots = slots_for(&mut all, chunks);
            for count in 1..=3 {
                // Both ways: home to spare when the count is odd, and back when it is even.
                let mut revocable = slots.begin();
                step(&mut revocable, (pool(), widest()), &mut all, &[0], &[count], &other)
                    .expect("a step");
                revocable.revert();
                let mut revocable = slots.begin();
                step(&mut revocable, (pool(), widest()), &mut all, &[0], &[count], &hyper)
                    .expect("a step");
                if count == 1 {
                    assert_equal(
                        &all,
                        &before,
                        "the old bits stand until the commit, and reverted steps left none",
                    );
                }
                revocable.commit();
                assert_eq!(slots.num_in_spares(), if count % 2 == 1 { chunks } else { 0 });
                expected[0].step(widest(), count, &hyper);
                if count == 2 {
                    assert_equal(&all, &expected, "home again");
                }
            }
            // The reverted step has written the home of what is in spares.
            let mut revocable = slots.begin();
            step(&mut revocable, (pool(), widest()), &mut all, &[0], &[4], &other).expect("a step");
            drop(revocable);
            copy_home(&mut slots, pool(), &mut all);
            assert_equal(&all, &expected, "copied home");
            // Settled twice, nothing is left to do; and the next step is out of place again.
            copy_home(&mut slots, pool(), &mut all);
            let mut revocable = slots.begin();
            step(&mut revocable, (pool(), widest()), &mut all, &[0], &[4], &other).expect("a step");
            revocable.revert();
            assert_equal(&all, &expected, "reverted");
        }
    }
}

/// Tensors of every state and some sizes.
fn mixed(seed: u64) -> Vec<Held> {
    let sizes = if is_hurried() {
        [CHUNK_LEN + 65, 70, 1, 0, 33]
    } else {
        [2 * CHUNK_LEN + 65, 70, CHUNK_LEN, 0, 33]
    };
    let state = |(index, layout): (usize, Layout)| {
        let mut held = Held::random(
            layout,
            sizes[index % sizes.len()],
            index % 2,
            Spread::Special,
            seed.wrapping_add(index as u64),
        );
        held.key = index as u64;
        held
    };
    Layout::states().into_iter().enumerate().map(state).collect()
}

#[test]
fn threads_and_isas_do_not_show() {
    let before = mixed(1);
    let numbers: Vec<usize> = (0..before.len()).collect();
    let counts =
        |first: u64| -> Vec<u64> { numbers.iter().map(|&number| first + number as u64).collect() };
    let hyper = Hyper { weight_decay: 0.1, ..Hyper::default() };
    for isa in Isa::available() {
        let mut expected = moved(&before, 0);
        for first in [1, 2, 3] {
            for (held, count) in expected.iter_mut().zip(counts(first)) {
                held.step(isa, count, &hyper);
            }
        }
        for workers in [1, 2, 3] {
            let pool = pool_of(workers);
            let mut all = moved(&before, 0);
            let spares = all.iter().map(|held| num_chunks(held.numel)).sum();
            let mut slots = slots_for(&mut all, spares);
            for first in [1, 2, 3] {
                let mut revocable = slots.begin();
                step(&mut revocable, (&pool, isa), &mut all, &numbers, &counts(first), &hyper)
                    .expect("a step");
                revocable.commit();
            }
            assert_eq!(slots.num_in_spares(), spares);
            copy_home(&mut slots, &pool, &mut all);
            assert_equal(&all, &expected, &format!("{workers} workers on {}", isa.name()));
        }
    }
}

proptest! {
    #![proptest_config(cases(24))]

    /// Any sequence of commits, reverts, refusals and copies home of any tensors is the sequence of
    /// the committed steps in place.
    #[test]
    fn any_sequence_follows_the_model(hyper in hypers(), seed: u64, share in 0_usize..=4) {
        let mut draw = Draw::new(seed);
        let mut all: Vec<Held> = mixed(seed).into_iter().filter(|_| draw.below(3) == 0).collect();
        prop_assume!(!all.is_empty());
        let mut expected: Vec<Held> =
            all.iter().enumerate().map(|(index, held)| held.moved(index % 2)).collect();
        all = all.iter().enumerate().map(|(index, held)| held.moved(index % 2)).collect();
        let chunks: Vec<usize> = all.iter().map(|held| num_chunks(held.numel)).collect();
        let spares = chunks.iter().sum::<usize>() * share / 4;
        let mut slots = slots_for(&mut all, spares);
        // The model: steps that were committed, and which tensors are in spares.
        let (mut counts, mut is_in_spare) = (vec![0_u64; all.len()], vec![false; all.len()]);
        let pools = [pool_of(1), pool_of(2)];
        for _ in 0..scaled(12) {
            let pool = &pools[draw.below(2)];
            let in_spares: usize = (0..all.len())
                .filter(|&number| is_in_spare[number])
                .map(|number| chunks[number])
                .sum();
            prop_assert_eq!(slots.num_in_spares(), in_spares);
            if draw.below(6) == 0 {
                copy_home(&mut slots, pool, &mut all);
                is_in_spare.fill(false);
                assert_equal(&all, &expected, "copied home on the way");
                continue;
            }
            let mut free = spares - in_spares;
            let mut revocable = slots.begin();
            let mut stepped: Vec<usize> = Vec::new();
            for _ in 0..=draw.below(2) {
                let numbers: Vec<usize> = (0..all.len())
                    .filter(|number| draw.below(2) == 0 && !stepped.contains(number))
                    .collect();
                let next: Vec<u64> = numbers.iter().map(|&number| counts[number] + 1).collect();
                let needed: usize = numbers
                    .iter()
                    .filter(|&&number| !is_in_spare[number])
                    .map(|&number| chunks[number])
                    .sum();
                match step(&mut revocable, (pool, widest()), &mut all, &numbers, &next, &hyper) {
                    Ok(()) => {
                        prop_assert!(needed <= free);
                        free -= needed;
                        stepped.extend(numbers);
                    }
                    Err(Error::Value(message)) => {
                        prop_assert!(needed > free, "{}", message);
                        let said = format!(
                            "`{needed}` chunks are to be written to spare slots, and `{free}` of \
                             {spares} are free"
                        );
                        prop_assert!(message.contains(&said), "{} does not say {}", message, said);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            if draw.below(2) == 0 {
                revocable.commit();
                for number in stepped {
                    counts[number] += 1;
                    is_in_spare[number] = !is_in_spare[number] && chunks[number] > 0;
                    expected[number].step(widest(), counts[number], &hyper);
                }
            } else {
                revocable.revert();
            }
        }
        copy_home(&mut slots, &pools[0], &mut all);
        assert_equal(&all, &expected, "in the end");
    }
}

fn split(numel: usize, seed: u64) -> Held {
    let layout = Layout::new(ParamKind::Split, MomentsKind::Float32, Dtype::BFloat16);
    Held::random(layout, numel, 0, Spread::Ordinary, seed)
}

/// A step that must be refused says why, changes nothing, and leaves what was stepped before it to
/// commit.
#[test]
fn what_is_refused_changes_nothing() {
    let hyper = Hyper::default();
    let before = [split(2 * CHUNK_LEN, 1), split(CHUNK_LEN + 1, 2), split(70, 3)];
    let mut expected = moved(&before, 0);
    expected[1].step(widest(), 1, &hyper);
    let mut all = moved(&before, 0);
    let mut slots = slots_for(&mut all, 3);
    assert_eq!(slots.slot_nbytes(), CHUNK_LEN * (2 + 2 + 4 + 4) + 64);

    type Spoil = fn(&mut Vec<(usize, AdamTensor)>, &mut Vec<u64>, &mut Hyper);
    let spoils: [(&[&str], Spoil); 7] = [
        (&["`2` chunks", "`1` of 3", "hint"], |_, _, _| {}),
        (&["tensor `3`", "3"], |tensors, _, _| tensors[0].0 = 3),
        (&["tensor 2", "`131072 elements: param bfloat16", "70 elements"], |tensors, _, _| {
            tensors[0].0 = 2
        }),
        (&["fingerprints"], |tensors, _, _| {
            tensors[0].1 = tensors[0].1.without_fingerprints();
        }),
        (&["tensor 0", "grad"], |tensors, _, _| tensors[0].1.grad = None),
        (&["overlap"], |tensors, counts, _| {
            tensors.push(tensors[0]);
            counts.push(1);
        }),
        (&["lr", "`NaN`"], |_, _, hyper| hyper.lr = f64::NAN),
    ];
    let mut revocable = slots.begin();
    step(&mut revocable, (pool(), widest()), &mut all, &[1], &[1], &hyper).expect("two spares");
    let error = step(&mut revocable, (pool(), widest()), &mut all, &[1], &[2], &hyper)
        .expect_err("stepped already");
    assert!(
        error.to_string().contains("chunk `0` of tensor `1` is to be stepped twice"),
        "{error}"
    );
    for (said, spoil) in spoils {
        let (mut tensors, mut counts, mut hyper) = (vec![(0, all[0].tensor())], vec![1], hyper);
        spoil(&mut tensors, &mut counts, &mut hyper);
        // SAFETY: the views are of `all`.
        let refused = unsafe { revocable.step(pool(), widest(), &tensors, &counts, &hyper) };
        let Err(Error::Value(message)) = refused else {
            panic!("{refused:?}, expected what says {said:?}")
        };
        assert!(
            said.iter().all(|said| message.contains(said)),
            "`{message}` does not say {said:?}"
        );
        assert_equal(&all, &before, &message);
    }
    revocable.commit();
    assert_eq!(slots.num_in_spares(), 2);

    // Settling takes all tensors, and those that the slots are for.
    let mut given = tensors(&mut all);
    given.swap(0, 2);
    for (given, said) in [(&given[..2], "`2` tensors"), (&given[..], "tensor 0")] {
        // SAFETY: as above.
        let error = unsafe { slots.copy_home(pool(), given) }.expect_err("other tensors");
        assert!(error.to_string().contains(said), "{error}");
    }
    let mut given = tensors(&mut all);
    given[0].param =
        View::new(given[1].moments()[0].address(), Dtype::BFloat16, given[0].param.numel())
            .expect("a view");
    // SAFETY: as above.
    let error = unsafe { slots.copy_home(pool(), &given) }.expect_err("overlapping tensors");
    assert!(error.to_string().contains("overlap"), "{error}");
    assert_equal(&all, &before, "refused");
    copy_home(&mut slots, pool(), &mut all);
    assert_equal(&all, &expected, "copied home");
}

#[test]
fn slots_that_do_not_fit_into_memory_are_refused() {
    let mut all = [split(CHUNK_LEN, 1)];
    let error = HostSlots::new(&tensors(&mut all), usize::MAX / 2, pool()).expect_err("too many");
    assert!(matches!(error, Error::Value(_)) && error.to_string().contains("spares is"), "{error}");
}

#[test]
fn without_tensors_or_spares_there_is_nothing_to_do() {
    let mut slots = slots_for(&mut [], 3);
    step(&mut slots.begin(), (pool(), widest()), &mut [], &[], &[], &Hyper::default())
        .expect("nothing");
    copy_home(&mut slots, pool(), &mut []);
    let mut all = [split(0, 1)];
    let mut slots = slots_for(&mut all, 0);
    let mut revocable = slots.begin();
    step(&mut revocable, (pool(), widest()), &mut all, &[0], &[1], &Hyper::default())
        .expect("nothing");
    revocable.commit();
    copy_home(&mut slots, pool(), &mut all);
}
