//! Jobs that fail in the background: the next call has the cause, and so have all that follow. The
//! device has whole weights all the while: of each tensor the one that it had, or the one that an
//! engine without a failure uploads.

use std::{
    io,
    sync::{
        atomic::{AtomicBool, AtomicUsize},
        mpsc,
    },
    thread,
    time::Duration,
};

use stepwell::{
    offload::LANDINGS_IN_FLIGHT_MAX,
    state::chunk::Chunk,
    stream::view::Route,
    tier::{Planned, Stored},
};

use super::{
    on_device::{Call, at_once, count, wait_until, witness},
    *,
};

const OF_TIER: &str = "the drive is out of order";
const OF_PANIC: &str = "the drive is out of its mind";
const OF_DEVICE: &str = "the bus is out of order";
const OF_PANICKING_DEVICE: &str = "the device is out of its mind";

/// How many steps work.
const STEPS: u64 = 3;

/// What a tier cannot do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Begin,
    Fetch,
    FetchPanics,
    Store,
    Commit,
}

/// Keeps state in the tensors, as [`Ram`], until it breaks. Of a tensor the first chunk is stepped
/// then, and the second is not fetched, or not stored.
struct Breaking {
    fault: Fault,
    stored: Stored,
    /// The first of the tensors whose chunks fail.
    first: usize,
    is_broken: AtomicBool,
    /// The tensors that had a turn since then, and of these the ones that failed: a bit each.
    turned: AtomicUsize,
    failed: AtomicUsize,
}

impl Breaking {
    fn new(fault: Fault, stored: Stored, first: usize) -> Self {
        Self {
            fault,
            stored,
            first,
            is_broken: AtomicBool::new(false),
            turned: AtomicUsize::new(0),
            failed: AtomicUsize::new(0),
        }
    }

    fn call(&self, faults: &[Fault]) -> Result<(), Error> {
        if !self.is_broken.load(Ordering::Relaxed) || !faults.contains(&self.fault) {
            return Ok(());
        }
        assert!(self.fault != Fault::FetchPanics, "{OF_PANIC}");
        Err(Error::os("a record", io::Error::other(OF_TIER)))
    }

    fn call_of(&self, chunk: Chunk, faults: &[Fault]) -> Result<(), Error> {
        if chunk.index != 1 || chunk.tensor < self.first {
            return Ok(());
        }
        if self.is_broken.load(Ordering::Relaxed) && faults.contains(&self.fault) {
            self.failed.fetch_or(1 << chunk.tensor, Ordering::SeqCst);
        }
        self.call(faults)
    }
}

// SAFETY: it routes as `Ram`.
unsafe impl Tier for Breaking {
    fn begin(&self, runs: &mut dyn Iterator<Item = Planned<'_>>) -> Result<(), Error> {
        if self.is_broken.load(Ordering::Relaxed) {
            runs.for_each(|run| {
                self.turned.fetch_or(1 << run.tensor, Ordering::SeqCst);
            });
        }
        self.call(&[Fault::Begin])
    }

    fn fetch(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<AdamTensor<Route>, Error> {
        self.call_of(chunk, &[Fault::Fetch, Fault::FetchPanics])?;
        Ram.fetch(tensor, chunk)
    }

    fn store(&self, _: &AdamTensor, chunk: Chunk) -> Result<Stored, Error> {
        self.call_of(chunk, &[Fault::Store])?;
        Ok(self.stored)
    }

    fn is_at_home(&self, _: usize) -> bool {
        true
    }

    fn commit(&self) -> Result<(), Error> {
        self.call(&[Fault::Commit])
    }
}

/// The tensors whose bits are there.
fn named(bits: &AtomicUsize) -> Vec<usize> {
    let bits = bits.load(Ordering::SeqCst);
    (0..usize::BITS as usize).filter(|index| bits >> index & 1 == 1).collect()
}

/// The job that fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Last {
    Deferred,
    /// A deferred one, with the first tensor at once.
    AtOnce,
    Exact,
    Settle,
}

/// Of each tensor the bytes of its weight.
type Weights = Vec<Vec<u8>>;

/// Tensors of one segment each, some of several chunks, in each of two groups.
fn of_chunks() -> Vec<OnDevice> {
    let kinds = [
        (ParamKind::Split, Dtype::BFloat16, 2 * CHUNK_LEN + 9),
        (ParamKind::Float32, Dtype::Float32, CHUNK_LEN + 1),
        (ParamKind::Shadowed, Dtype::Float16, 77),
        (ParamKind::Split, Dtype::BFloat16, 0),
        (ParamKind::Float32WithBf16, Dtype::BFloat16, CHUNK_LEN + 5),
        (ParamKind::Split, Dtype::BFloat16, 3),
    ];
    let one = |(seed, (param, grad, numel)): (usize, (ParamKind, Dtype, usize))| {
        let layout = Layout::new(param, MomentsKind::Float32, grad);
        OnDevice::new(Held::random(layout, numel, 0, Spread::Ordinary, seed as u64))
    };
    kinds.into_iter().enumerate().map(one).collect()
}

/// As many tensors of one chunk as land in three rounds.
fn of_one_chunk() -> Vec<OnDevice> {
    (0..3 * LANDINGS_IN_FLIGHT_MAX as u64).map(|seed| on_device::split(100, seed)).collect()
}

/// An engine, and the steps that it has done.
struct Run {
    // First, so that it is dropped first.
    deferred: Deferred,
    gated: Arc<Gated>,
    tier: Arc<Breaking>,
    ahead: f32,
    all: Vec<OnDevice>,
    expected: Vec<Held>,
    /// For each step what the weights of the oracle are behind it.
    history: Vec<Weights>,
    count: u64,
    /// For each step how often what was lent for it was dropped.
    lent: Vec<Arc<AtomicUsize>>,
}

impl Run {
    fn new(mut all: Vec<OnDevice>, interval: usize, ahead: f32, tier: Breaking) -> Self {
        for one in &mut all {
            one.weight = bytes(one.held.tensor().weight());
        }
        let (gated, tier) = (Arc::new(Gated::with_events(256)), Arc::new(tier));
        let device = Arc::clone(&gated) as Arc<dyn Device>;
        let in_tier = Arc::clone(&tier) as Arc<dyn Tier>;
        let deferred = deferred_in(in_tier, |_| device, &mut all, interval, true);
        let expected = copies(&all);
        let history = vec![all.iter().map(|one| one.weight.clone()).collect()];
        let lent = Vec::new();
        Self { deferred, gated, tier, ahead, all, expected, history, count: 0, lent }
    }

    /// Steps that work.
    fn step(&mut self) {
        for _ in 0..STEPS {
            self.submit(Last::Deferred).expect("a step");
            finish(&self.deferred.engine);
        }
    }

    fn submit(&mut self, last: Last) -> Result<(), Error> {
        let engine = &self.deferred.engine;
        if last == Last::Settle {
            return engine.settle(STREAM).map(|_| ());
        }
        self.count += 1;
        let (count, hyper) = (self.count, hyper_of(self.count));
        draw(&mut self.all, &mut self.expected, count);
        take(engine, &self.all, |_| true)?;
        let mut updates = updates(&mut self.all, |_| count, hyper, |_| true);
        updates[0].is_at_once = last == Last::AtOnce;
        let (owners, dropped) = witness();
        let mut owners = Some(owners);
        // SAFETY: the tensors outlive the engine.
        unsafe {
            match last {
                Last::Exact => engine.submit(&updates, &mut owners, STREAM),
                _ => engine.submit_deferred(self.ahead, &updates, &mut owners, STREAM),
            }
        }?;
        self.lent.push(dropped);
        self.expected.iter_mut().for_each(|one| one.step(widest(), count, &hyper));
        let weights = self.expected.iter_mut().map(|one| bytes(one.tensor().weight()));
        self.history.push(weights.collect());
        Ok(())
    }

    fn weights(&self) -> Weights {
        self.all.iter().map(|one| one.weight.clone()).collect()
    }

    /// Every call fails with this cause, the first and those behind it, and none waits for ever.
    fn assert_fails(&mut self, cause: &str, what: &str) {
        let engine = &self.deferred.engine;
        let has_failed = |call: &str, told: Result<(), Error>| {
            let Err(error) = told else { panic!("{what}: {call} has not failed") };
            let said = error.to_string();
            assert!(matches!(error, Error::Os { .. }), "{what}: {call}: {said}");
            assert!(said.contains(cause), "{what}: {call}: {said}");
            assert!(said.contains("a step failed half-way"), "{what}: {call}: {said}");
        };
        has_failed("finish", engine.finish(STREAM, SOON).map(drop));
        let count = self.count + 1;
        let updates = updates(&mut self.all, |_| count, hyper_of(count), |_| true);
        for _ in 0..2 {
            has_failed("wait", engine.wait(0, &(0..1), STREAM, SOON).map(drop));
            has_failed("next_group", engine.next_group(SOON).map(drop));
            has_failed("take", take(engine, &self.all, |_| true));
            has_failed("a deferred step", submit(engine, &updates, Some(self.ahead)));
            has_failed("an exact step", submit(engine, &updates, None));
            has_failed("settle", engine.settle(STREAM).map(drop));
            has_failed("drain", engine.drain(SOON).map(drop));
            has_failed("finish", engine.finish(STREAM, SOON).map(drop));
        }
    }

    /// Drops the engine, and so waits for all copies. What was lent is held until then.
    fn ended(self, what: &str) -> Vec<OnDevice> {
        let Self { all, deferred, lent, .. } = self;
        let engine = deferred.engine;
        engine.returned().for_each(drop);
        assert!(lent.iter().all(|one| count(one) == 0), "{what}: what is lent was dropped");
        at_once(move || drop(engine));
        assert!(lent.iter().all(|one| count(one) == 1), "{what}: what is lent was not dropped");
        deferred.gradients.assert_guards("gradients");
        all
    }
}

/// What the device has before and after the last job, where nothing fails: whole weights.
fn versions(all: Vec<OnDevice>, interval: usize, ahead: f32, last: Last) -> (Weights, Weights) {
    let tier = Breaking::new(Fault::Begin, Stored::Final, 0);
    let mut run = Run::new(all, interval, ahead, tier);
    run.step();
    let before = run.weights();
    run.submit(last).expect("a step");
    finish(&run.deferred.engine);
    let after = run.weights();
    assert!(before != after, "nothing lands");
    for weights in [&before, &after] {
        for (index, weight) in weights.iter().enumerate().filter(|_| ahead == 0.0) {
            let is_of_a_step = run.history.iter().any(|then| then[index] == *weight);
            assert!(is_of_a_step, "tensor {index}: a weight of no step");
        }
    }
    (before, after)
}

/// The parts of a weight that are of its first and its second chunk.
fn chunks(weight: &[u8], numel: usize) -> [&[u8]; 2] {
    let nbytes = CHUNK_LEN * (weight.len() / numel);
    let (first, others) = weight.split_at(nbytes);
    [first, &others[..nbytes.min(others.len())]]
}

#[test]
fn a_turn_that_fails_is_told_with_its_cause_and_nothing_of_it_lands() {
    for (interval, ahead) in [(1, 0.0), (2, 0.0), (1, 2.5)] {
        let (before, after) = versions(of_chunks(), interval, ahead, Last::Deferred);
        for fault in [Fault::Begin, Fault::Fetch, Fault::FetchPanics, Fault::Store, Fault::Commit] {
            let what = format!("{fault:?}, every {interval}, {ahead} ahead");
            let tier = Breaking::new(fault, Stored::Final, 0);
            let mut run = Run::new(of_chunks(), interval, ahead, tier);
            run.step();
            run.tier.is_broken.store(true, Ordering::Relaxed);
            run.submit(Last::Deferred).expect("a step");
            run.assert_fails(if fault == Fault::FetchPanics { OF_PANIC } else { OF_TIER }, &what);
            let tier = Arc::clone(&run.tier);
            let mut all = run.ended(&what);
            // What had its turn a step ago lands with the job, whole, before that fails.
            let landed = if fault == Fault::Begin { &before } else { &after };
            for (index, (one, landed)) in all.iter().zip(landed).enumerate() {
                assert!(one.weight == *landed, "{what}: tensor {index}");
            }
            let failed = named(&tier.failed);
            let is_of_chunks = !matches!(fault, Fault::Begin | Fault::Commit);
            assert_eq!(!failed.is_empty(), is_of_chunks, "{what}: nothing has failed half-way");
            for &index in failed.iter().filter(|_| ahead == 0.0 && fault != Fault::Store) {
                // Host memory has a weight of no step.
                let OnDevice { held, weight, .. } = &mut all[index];
                let host = bytes(held.tensor().weight());
                let [host, device] = [&host, &*weight].map(|one| chunks(one, held.numel));
                assert!(host[0] != device[0], "{what}: the first chunk of {index} was not stepped");
                assert!(host[1] == device[1], "{what}: the second chunk of {index} was stepped");
            }
        }
    }
}

#[test]
fn what_lands_at_once_is_not_uploaded_where_it_fails_half_way() {
    use Fault::{Begin, Commit, Fetch, FetchPanics, Store};
    let cases = [
        (Begin, Stored::Final),
        (Fetch, Stored::Final),
        (FetchPanics, Stored::Final),
        (Store, Stored::Final),
        (Fetch, Stored::WithCommit),
        (Commit, Stored::WithCommit),
    ];
    for last in [Last::AtOnce, Last::Exact, Last::Settle] {
        let (before, after) = versions(of_chunks(), 2, 0.0, last);
        for (fault, stored) in cases {
            let what = format!("{fault:?}, {last:?}, {stored:?}");
            // Those before it may be uploaded.
            let first = if last == Last::Exact { 4 } else { 0 };
            let mut run = Run::new(of_chunks(), 2, 0.0, Breaking::new(fault, stored, first));
            run.step();
            run.tier.is_broken.store(true, Ordering::Relaxed);
            run.submit(last).expect("a step");
            run.assert_fails(if fault == FetchPanics { OF_PANIC } else { OF_TIER }, &what);
            let tier = Arc::clone(&run.tier);
            let all = run.ended(&what);
            for (index, one) in all.iter().enumerate() {
                let is_whole = one.weight == before[index] || one.weight == after[index];
                assert!(is_whole, "{what}: tensor {index} has a weight of no step");
            }
            let is_late = stored == Stored::WithCommit || fault == Begin;
            let kept = named(if is_late { &tier.turned } else { &tier.failed });
            assert!(!kept.is_empty(), "{what}: nothing has failed");
            let would_land = |&index: &usize| before[index] != after[index];
            assert!(kept.iter().any(would_land), "{what}: nothing was to land");
            for index in kept {
                assert!(all[index].weight == before[index], "{what}: tensor {index} has landed");
            }
        }
    }
}

#[test]
fn an_upload_that_fails_is_told_with_its_cause_and_changes_nothing() {
    for last in [Last::Deferred, Last::AtOnce, Last::Exact, Last::Settle] {
        for (interval, stored, panics) in [
            (1, Stored::Final, false),
            (2, Stored::Final, false),
            (2, Stored::WithCommit, false),
            (2, Stored::Final, true),
        ] {
            let what = format!("{last:?}, every {interval}, {stored:?}, panics: {panics}");
            let tier = Breaking::new(Fault::Begin, stored, 0);
            let mut run = Run::new(of_chunks(), interval, 0.0, tier);
            run.step();
            let before = run.weights();
            run.gated.panics.store(panics, Ordering::Relaxed);
            run.gated.uploads_fail.store(true, Ordering::Relaxed);
            run.submit(last).expect("a step");
            let cause = if panics { OF_PANICKING_DEVICE } else { OF_DEVICE };
            run.assert_fails(cause, &what);
            // It does not go on where the device would.
            run.gated.uploads_fail.store(false, Ordering::Relaxed);
            run.assert_fails(cause, &what);
            assert!(run.ended(&what).iter().zip(&before).all(|(one, then)| one.weight == *then));
        }
    }
}

#[test]
fn landings_before_the_one_that_fails_are_whole_and_the_others_are_not_begun() {
    let (before, after) = versions(of_one_chunk(), 1, 0.0, Last::Deferred);
    let tier = Breaking::new(Fault::Begin, Stored::Final, 0);
    let mut run = Run::new(of_one_chunk(), 1, 0.0, tier);
    let gated = Arc::clone(&run.gated);
    run.step();
    let _resumed = Resumed(&gated.host);
    let uploads = || {
        let calls = gated.calls.lock().expect("no panic");
        calls.iter().filter(|(_, call)| matches!(call, Call::Copy(Lane::Upload, _))).count()
    };
    gated.calls.lock().expect("no panic").clear();
    gated.host.pause(Lane::Upload, true);
    run.submit(Last::Deferred).expect("a step");
    wait_until(|| uploads() == LANDINGS_IN_FLIGHT_MAX);
    gated.uploads_fail.store(true, Ordering::Relaxed);
    gated.host.pause(Lane::Upload, false);
    run.assert_fails(OF_DEVICE, "the fifth");
    gated.uploads_fail.store(false, Ordering::Relaxed);
    run.assert_fails(OF_DEVICE, "the fifth");
    let all = run.ended("the fifth");
    assert_eq!(uploads(), LANDINGS_IN_FLIGHT_MAX);
    for (index, one) in all.iter().enumerate() {
        assert!(before[index] != after[index], "tensor {index} would not land");
        let landed = if index < LANDINGS_IN_FLIGHT_MAX { &after } else { &before };
        assert!(one.weight == landed[index], "tensor {index}");
    }
}

#[test]
fn a_gradient_that_does_not_come_is_told_with_its_cause_and_steps_nothing_half_way() {
    for interval in [1, 2] {
        let (before, after) = versions(of_chunks(), interval, 0.0, Last::Deferred);
        let tier = Breaking::new(Fault::Begin, Stored::Final, 0);
        let mut run = Run::new(of_chunks(), interval, 0.0, tier);
        run.step();
        run.gated.downloads_left.store(1, Ordering::Relaxed);
        // The copies may have failed before the step is submitted, or behind it.
        let told = run.submit(Last::Deferred);
        let engine = &run.deferred.engine;
        let told = told.and_then(|()| engine.finish(STREAM, SOON).map(drop));
        let said = told.expect_err("must fail").to_string();
        assert!(said.contains(OF_DEVICE), "{said}");
        for _ in 0..2 {
            let said = take(engine, &run.all, |_| true).expect_err("must fail").to_string();
            assert!(said.contains(OF_DEVICE), "{said}");
        }
        let all = run.ended("gradients");
        for (index, one) in all.iter().enumerate() {
            let is_whole = one.weight == before[index] || one.weight == after[index];
            assert!(is_whole, "tensor {index} has a weight of no step");
        }
    }
}

#[test]
fn callers_that_wait_for_a_job_are_told_when_it_fails() {
    // Longer than the test waits for an answer.
    const LATE: Duration = SOON.saturating_mul(2);
    type Wait = fn(&Engine) -> Result<(), Error>;
    let waits: [Wait; 3] = [
        |engine| engine.finish(STREAM, LATE).map(drop),
        |engine| engine.next_group(LATE).map(drop),
        |engine| engine.wait(0, &(0..1), STREAM, LATE).map(drop),
    ];
    for (number, wait) in waits.into_iter().enumerate() {
        let tier = Breaking::new(Fault::Fetch, Stored::Final, 0);
        let mut run = Run::new(of_chunks(), 2, 0.0, tier);
        let gated = Arc::clone(&run.gated);
        run.step();
        let _resumed = Resumed(&gated.host);
        gated.host.pause(Lane::Download, true);
        run.tier.is_broken.store(true, Ordering::Relaxed);
        run.submit(Last::AtOnce).expect("a step");
        let engine = &run.deferred.engine;
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            scope.spawn(move || sender.send(wait(engine)).expect("a receiver"));
            let early = receiver.recv_timeout(WATCHED);
            assert!(early.is_err(), "call {number}: the gradients have not come");
            gated.host.pause(Lane::Download, false);
            let told = receiver.recv_timeout(SOON).expect("an answer");
            let said = told.expect_err("must fail").to_string();
            assert!(said.contains(OF_TIER), "call {number}: {said}");
        });
        run.assert_fails(OF_TIER, "a call that has waited");
        run.ended("a call that has waited");
    }
}
