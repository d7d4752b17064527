//! A step of the engine allocates nothing that grows with the model.

mod battery;
mod on_device;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use on_device::{OnDevice, SOON, STREAM, drain, engine_with, finish, host_device, lent, split};
use stepwell::{
    adam::Hyper,
    offload::{Engine, Update},
    stream::view::View,
    tier::ram::Ram,
};

/// The system's allocator, which counts the bytes that all threads ask for.
struct Counting;

static NBYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NBYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: passed on from the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: passed on from the caller.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        NBYTES.fetch_add(size, Relaxed);
        // SAFETY: passed on from the caller.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Takes the gradients in so many calls, and steps them.
///
/// # Safety
/// The memory of both outlives the step, which is waited for.
unsafe fn step(
    engine: &Engine,
    gradients: &[(usize, u64, View)],
    updates: &[Update],
    calls: usize,
) {
    // SAFETY: passed on from the caller.
    unsafe {
        for of_call in gradients.chunks(gradients.len().div_ceil(calls)) {
            let (mut lent, _) = lent();
            assert!(engine.take(of_call, &mut lent, STREAM, SOON).expect("gradients"));
        }
        engine.submit(updates, &mut None, STREAM).expect("a step");
    }
    assert!(engine.release(STREAM, SOON).expect("a device that works"));
    for update in updates {
        let whole = 0..update.tensor.param.numel();
        assert!(engine.wait(update.index, &whole, STREAM, SOON).expect("a step that works"));
    }
    finish(engine);
    engine.returned().for_each(drop);
}

/// Bytes that are allocated in a step of so many tensors, when others have been before it.
fn allocated_by_a_step(tensors: u64, generations: usize) -> usize {
    let mut all: Vec<OnDevice> = (0..tensors).map(|seed| split(3, seed)).collect();
    let engine = engine_with(host_device(&all), &all, generations, Arc::new(Ram), 2);
    let gradients: Vec<_> =
        all.iter_mut().enumerate().map(|(index, one)| one.gradient(index)).collect();
    let mut updates: Vec<_> = all
        .iter_mut()
        .enumerate()
        .map(|(index, one)| one.update(index, 1, Hyper::default()))
        .collect();
    let mut least = usize::MAX;
    for count in 1..=4 {
        updates.iter_mut().for_each(|update| update.count = count);
        let before = NBYTES.load(Relaxed);
        // SAFETY: all memory outlives the engine.
        unsafe { step(&engine, &gradients, &updates, 2) };
        if count > 1 {
            least = least.min(NBYTES.load(Relaxed) - before);
        }
    }
    drain(&engine).expect("copies");
    least
}

// One test: others beside it would allocate as well.
#[test]
fn a_step_allocates_nothing_that_grows_with_the_model() {
    for generations in [1, 2] {
        let [few, many] = [4, 400].map(|tensors| allocated_by_a_step(tensors, generations));
        assert_eq!(few, many, "bytes, with {generations} generations");
        assert!(few < 1000, "`{few}` bytes: more than owners take");
    }
}
