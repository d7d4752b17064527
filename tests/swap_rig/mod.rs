//! What the tests of swaps share: tensors whose state is on a volume, and what they have to be.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::{
    num::NonZeroU64,
    sync::{Arc, atomic::AtomicBool},
};

use stepwell::{
    Error, Result,
    adam::{Hyper, tensor::AdamTensor},
    device::{Device, Lane},
    host::memory::AddressSpace,
    offload::{Engine, Update},
    state::chunk::CHUNK_LEN,
    stream::element::Dtype,
    tier::{
        Tier,
        swap::{Catalog, Config, Placed, Swap},
        volume::{Durability, Location, Options},
    },
};
use tempfile::TempDir;

use crate::{
    battery::{Held, Layout, MomentsKind, ParamKind, Spread, pool_of, widest},
    drives::Drives,
    on_device::{
        Call as DeviceCall, Gated, OnDevice, SOON, STREAM, bytes, engine_with, finish, host_device,
        split, stepped, take,
    },
};

/// Of more than one chunk, of exactly one, of a few elements.
pub(crate) const NUMELS: [usize; 4] = [3 * CHUNK_LEN + 77, CHUNK_LEN, 9, 2 * CHUNK_LEN - 1];

/// Tensors whose state is on a volume, and what they have to be.
pub(crate) struct Rig {
    pub(crate) all: Vec<OnDevice>,
    pub(crate) expected: Vec<Held>,
    /// Where the state of each is said to be.
    pub(crate) places: Vec<AddressSpace>,
    pub(crate) folders: TempDir,
    pub(crate) config: Config,
    pub(crate) count: u64,
    /// Whether the first step goes on from memory, and not from what the swap has.
    pub(crate) begins_in_memory: bool,
}

pub(crate) fn hyper() -> Hyper {
    Hyper { lr: 1e-3, weight_decay: 0.1, ..Hyper::default() }
}

impl Rig {
    pub(crate) fn new(all: Vec<OnDevice>, durability: Durability) -> Self {
        let folders = tempfile::tempdir().expect("a folder");
        let paths: Vec<_> = (0..2).map(|member| folders.path().join(member.to_string())).collect();
        paths.iter().for_each(|path| std::fs::create_dir(path).expect("a folder"));
        let space = |one: &OnDevice| {
            AddressSpace::new(one.held.moved(0).tensor().layout().slot_nbytes()).expect("addresses")
        };
        let config = Config {
            location: Location { name: "v".to_owned(), drives: paths },
            weights: Vec::new(),
            stripe_bytes: 64 << 10,
            durability,
            identity: 0,
            run: 7,
            packed: Vec::new(),
            ram_nbytes: 0,
            buffers_nbytes_max: usize::MAX,
            workers: 3,
            counts_each_step: false,
            commit_interval: NonZeroU64::MIN,
            options: Options { io_timeout: SOON, ..Options::default() },
        };
        Self {
            expected: all.iter().map(|one| one.held.moved(0)).collect(),
            places: all.iter().map(space).collect(),
            all,
            folders,
            config,
            count: 0,
            begins_in_memory: true,
        }
    }

    /// The same, with packed masters.
    pub(crate) fn packing(mut self, is_packed: bool) -> Self {
        self.config.packed = if is_packed { (0..self.all.len()).collect() } else { Vec::new() };
        self
    }

    /// Of a kind of parameters and moments, some of each size.
    pub(crate) fn of_kind(param: ParamKind, moments: MomentsKind, durability: Durability) -> Self {
        Self::new(of(Layout::new(param, moments, Dtype::BFloat16)), durability)
    }

    pub(crate) fn of_split(durability: Durability) -> Self {
        let all = NUMELS.iter().enumerate().map(|(seed, &numel)| split(numel, seed as u64));
        Self::new(all.collect(), durability)
    }

    pub(crate) fn faulty(durability: Durability) -> (Self, Arc<Drives>) {
        let drives = Drives::new();
        let mut rig = Self::of_split(durability);
        rig.config.options.between = drives.between();
        (rig, drives)
    }

    pub(crate) fn places(&mut self) -> Vec<AdamTensor> {
        let each = self.all.iter_mut().zip(&self.places);
        each.map(|(one, space)| {
            one.held.tensor().map(|field, view| view.at(space.address() + field.offset))
        })
        .collect()
    }

    pub(crate) fn create(&mut self) -> Result<Arc<Swap>> {
        let places = self.places();
        Swap::create(&self.config, &places, &pool_of(2)).map(Arc::new)
    }

    pub(crate) fn open(&mut self) -> Result<(Arc<Swap>, Catalog)> {
        let places = self.places();
        let (swap, found) = Swap::open(&self.config, &places, &pool_of(2))?;
        Ok((Arc::new(swap), found.expect("a committed step")))
    }

    /// A new swap, and an engine of it on a device that is the host.
    pub(crate) fn begin(&mut self) -> (Arc<Swap>, Engine) {
        let swap = self.create().expect("a swap");
        let engine = self.engine(host_device(&self.all), &swap);
        (swap, engine)
    }

    pub(crate) fn engine(&self, device: Arc<dyn Device>, swap: &Arc<Swap>) -> Engine {
        let of: Vec<_> = (0..self.all.len()).map(Some).collect();
        let tier = Placed::new(Arc::clone(swap), &of).expect("a tier");
        engine_with(device, &self.all, 1, Arc::new(tier) as Arc<dyn Tier>, self.config.workers)
    }

    /// Submits the next step: of state in memory the first time, then of what is on the volume.
    pub(crate) fn submit(&mut self, engine: &Engine) {
        self.count += 1;
        take(engine, &mut self.all).expect("gradients");
        let (count, places) = (self.count, &self.places);
        let begins_in_memory = self.begins_in_memory;
        let update = |(index, one): (usize, &mut OnDevice)| {
            let mut update: Update = one.update(index, count, hyper());
            if count > 1 || !begins_in_memory {
                let layout = *update.tensor.layout();
                update.tensor =
                    update.tensor.map(|field, view| match layout.record_offset(&field) {
                        None => view,
                        Some(_) => view.at(places[index].address() + field.offset),
                    });
            }
            update
        };
        let updates: Vec<_> = self.all.iter_mut().enumerate().map(update).collect();
        // SAFETY: the tensors outlive the step, which every test waits for or drops the engine for.
        unsafe { engine.submit(&updates, &mut None, STREAM) }.expect("a step");
    }

    pub(crate) fn expect_step(&mut self) {
        for (one, expected) in self.all.iter().zip(&mut self.expected) {
            if self.count == 1 {
                *expected = stepped(one, 1, &hyper());
            } else {
                expected.step(widest(), self.count, &hyper());
            }
        }
    }

    pub(crate) fn step(&mut self, engine: &Engine) {
        if self.count == 0 {
            // Before the engine writes the weights.
            self.count = 1;
            self.expect_step();
            self.count = 0;
            self.submit(engine);
        } else {
            self.submit(engine);
            self.expect_step();
        }
        finish(engine);
    }

    /// Asserts that a swap that was opened again has the state and the weights of `expected`, but
    /// for fingerprints. They are read to `to`.
    pub(crate) fn assert_found(
        &self,
        swap: &Swap,
        index: usize,
        to: &mut Held,
        expected: &mut Held,
    ) {
        let never = AtomicBool::new(false);
        let (to, expected) = (to.tensor(), expected.tensor());
        let all = 0..to.layout().numel();
        // SAFETY: the tensors are held, and no step runs.
        unsafe {
            assert!(swap.read(index, &to, all, &never).expect("state"));
            assert!(swap.read_weights(index, to.weight(), &never).expect("weights"));
        }
        for ((name, found), (_, expected)) in to.written().zip(expected.written()) {
            let is_same = bytes(found) == bytes(expected);
            assert!(name == "fingerprints" || is_same, "{name} of tensor {index}");
        }
    }

    /// The weights, the device's copies, and the state that the swap has.
    pub(crate) fn assert_as_expected(&mut self, swap: &Swap, what: &str) {
        let never = AtomicBool::new(false);
        for (index, (one, expected)) in self.all.iter_mut().zip(&mut self.expected).enumerate() {
            one.assert_uploaded();
            let to = one.held.tensor();
            let all = 0..to.layout().numel();
            // SAFETY: the tensor is held, and no step runs.
            assert!(unsafe { swap.read(index, &to, all, &never) }.expect("state"));
            one.held.assert_same(expected, what);
        }
    }
}

pub(crate) fn of(layout: Layout) -> Vec<OnDevice> {
    let one = |(seed, &numel): (usize, &usize)| {
        OnDevice::new(Held::random(layout, numel, 0, Spread::Ordinary, seed as u64))
    };
    NUMELS.iter().enumerate().map(one).collect()
}

/// # Safety
/// The memory is alive, and nothing else uses it.
pub(crate) unsafe fn zero(view: stepwell::stream::view::View) {
    let begin = std::ptr::with_exposed_provenance_mut::<u8>(view.address());
    // SAFETY: passed on from the caller.
    unsafe { begin.write_bytes(0, view.nbytes()) };
}

/// A step that a fault ends: its error, and what was uploaded in it.
pub(crate) fn failed_step(rig: &mut Rig, device: &Arc<Gated>, engine: &Engine) -> (Error, usize) {
    device.calls.lock().expect("no panic").clear();
    rig.submit(engine);
    let error = engine.finish(STREAM, SOON).expect_err("a step that a fault ends");
    let is_upload = |call: &DeviceCall| matches!(call, DeviceCall::Copy(Lane::Upload, _));
    let calls = device.calls.lock().expect("no panic");
    (error, calls.iter().filter(|(_, call)| is_upload(call)).count())
}
