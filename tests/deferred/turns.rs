//! A segment has one turn at a time: one in a job, and one job after the other.

use std::collections::BTreeSet;

use super::{
    on_device::tier::{Asked, Watched},
    *,
};

/// Fails where a chunk is stepped twice in a job, or a job begins before the last has ended.
fn assert_one_turn_at_a_time(asked: &[Asked]) {
    let (mut planned, mut fetched) = (BTreeSet::new(), BTreeSet::new());
    let mut is_over = true;
    for (at, asked) in asked.iter().enumerate() {
        match asked {
            Asked::Begin(runs) => {
                assert!(is_over, "call {at}: a job has begun before the last was committed");
                is_over = false;
                for (tensor, chunk) in runs
                    .iter()
                    .flat_map(|(tensor, chunks)| chunks.clone().map(|one| (*tensor, one)))
                {
                    let is_new = planned.insert((tensor, chunk));
                    assert!(is_new, "call {at}: two turns of chunk {chunk} of tensor {tensor}");
                }
            }
            Asked::Fetch(chunk) => {
                let place = (chunk.tensor, chunk.index);
                assert!(planned.remove(&place) && fetched.insert(place), "call {at}: {chunk:?}");
            }
            Asked::Store(chunk) => {
                assert!(fetched.remove(&(chunk.tensor, chunk.index)), "call {at}: {chunk:?}");
            }
            Asked::Commit => {
                assert!(planned.is_empty() && fetched.is_empty(), "call {at}: it is not stepped");
                is_over = true;
            }
        }
    }
    assert!(is_over, "the last job has not ended");
}

#[test]
fn a_segment_has_one_turn_at_a_time() {
    for interval in [1, 2, 3] {
        let mut all = tensors(MomentsKind::Float32);
        // The first has many more elements than the test needs.
        all[0] = on_device::split(2 * CHUNK_LEN, 0);
        let mut expected = copies(&all);
        let tier = Arc::new(Watched::default());
        let gated = Arc::new(Gated::with_events(256));
        gated.streams_wait.store(false, Ordering::Relaxed);
        let (in_tier, device) = (Arc::clone(&tier) as Arc<dyn Tier>, Arc::clone(&gated));
        let deferred =
            deferred_in(in_tier, |_| device as Arc<dyn Device>, &mut all, interval, true);
        let engine = &deferred.engine;
        for count in 1..=7 {
            draw(&mut all, &mut expected, count);
            take(engine, &all, |_| true).expect("gradients");
            let mut updates = updates(&mut all, |_| count, hyper_of(count), |_| true);
            // Some of the group whose turn it is, and others.
            updates.iter_mut().for_each(|one| {
                one.is_at_once = count % 3 == 2 && one.index != 2;
            });
            submit(engine, &updates, (count != 5).then_some(1.0)).expect("a step");
            expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper_of(count)));
            // What lands may still be on its way when the next is submitted.
            assert!(engine.finish(STREAM, SOON).expect("a step that works"));
        }
        settle(engine);
        assert_one_turn_at_a_time(&tier.asked.lock().expect("no panic"));
        assert_stepped(&mut all, &mut expected, &format!("every {interval}"));
    }
}
