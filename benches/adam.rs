//! Steps, norms, fingerprints and state exchange: bytes per second, in the cache and from memory.
//!
//! `cargo bench -- --test` runs each once on little memory. Threads as `STEPWELL_THREADS` says; a size that fits in a chunk runs on one.

use std::{hint::black_box, time::Duration};

use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime,
};
use stepwell::{
    adam::{
        Hyper,
        batch::step,
        exchange::{StateViews, read_state, write_state},
        tensor::{AdamTensor, Beside},
    },
    element::{Bf16, Dtype},
    grad_stats::grad_stats,
    isa::Isa,
    memory::{Buffer, BufferConfig},
    pool::Pool,
    state::{
        chunk::{CHUNK_LEN, num_chunks},
        q8,
        split::Fingerprint,
    },
    view::View,
};

/// One chunk: some 700 KiB of fp32 state and gradient.
const CACHED_LEN: usize = CHUNK_LEN;
/// Sixteen million: hundreds of megabytes, beyond every cache.
const MEMORY_LEN: usize = 1 << 24;

/// A parameter and what is held beside it.
#[derive(Clone, Copy)]
enum Master {
    Float32,
    Float32WithWeight,
    Split,
    Shadowed,
    Plain,
}

#[derive(Clone, Copy)]
struct Layout {
    name: &'static str,
    master: Master,
    grad: Dtype,
    /// Of the moments.
    codec: Dtype,
}

const LAYOUTS: [Layout; 9] = {
    use Dtype::{BFloat16, Float16, Float32, Uint8};
    const fn layout(name: &'static str, master: Master, grad: Dtype, codec: Dtype) -> Layout {
        Layout { name, master, grad, codec }
    }
    [
        layout("fp32", Master::Float32, Float32, Float32),
        layout("fp32 bf16-moments", Master::Float32, Float32, BFloat16),
        layout("fp32 q8", Master::Float32, Float32, Uint8),
        layout("fp32 weight-out", Master::Float32WithWeight, BFloat16, Float32),
        layout("split", Master::Split, BFloat16, Float32),
        layout("split bf16-moments", Master::Split, BFloat16, BFloat16),
        layout("split q8", Master::Split, BFloat16, Uint8),
        layout("fp16 with master", Master::Shadowed, Float16, Float32),
        layout("plain bf16", Master::Plain, BFloat16, Float32),
    ]
};

/// Memory for views, kept until it is dropped.
struct Arena {
    buffers: Vec<Buffer>,
    pool: &'static Pool,
}

impl Arena {
    fn new() -> Self {
        Self { buffers: Vec::new(), pool: Pool::global().expect("a pool") }
    }

    fn view(&mut self, dtype: Dtype, numel: usize) -> View {
        let buffer = Buffer::new(numel * dtype.size(), &BufferConfig::default(), self.pool).expect("memory");
        let view = View::new(buffer.as_ptr().expose_provenance(), dtype, numel).expect("a valid view");
        self.buffers.push(buffer);
        view
    }

    fn gradient(&mut self, dtype: Dtype, numel: usize) -> View {
        let view = self.view(dtype, numel);
        // Small and of both signs, in every dtype: 0.0078 in bf16, and what such bits are in fp16.
        let bits = |index: usize| 0x3c00_u16 + (index % 97) as u16 + if index.is_multiple_of(2) { 0x8000 } else { 0 };
        if dtype == Dtype::Float32 {
            // SAFETY: the arena's memory, which nobody else has yet.
            let values = unsafe { view.slice_mut::<f32>(0..numel) };
            values.iter_mut().enumerate().for_each(|(index, value)| *value = Bf16(bits(index)).to_f32());
        } else {
            // SAFETY: as above.
            let values = unsafe { view.slice_mut::<Bf16>(0..numel) };
            values.iter_mut().enumerate().for_each(|(index, value)| *value = Bf16(bits(index)));
        }
        view
    }

    fn tensor(&mut self, layout: Layout, numel: usize) -> AdamTensor {
        let moments = if layout.codec == Dtype::Uint8 { q8::codes_len(numel) } else { numel };
        let mut beside = Beside::default();
        let param = match layout.master {
            Master::Float32 => Dtype::Float32,
            Master::Float32WithWeight => {
                beside.weight_out = Some(self.view(Dtype::BFloat16, numel));
                Dtype::Float32
            }
            Master::Split => {
                beside.trailing = Some(self.view(Dtype::Int16, numel));
                beside.fingerprints = Some(self.view(Dtype::Int32, num_chunks(numel)));
                Dtype::BFloat16
            }
            Master::Shadowed => {
                beside.master = Some(self.view(Dtype::Float32, numel));
                Dtype::Float16
            }
            Master::Plain => Dtype::BFloat16,
        };
        if layout.codec == Dtype::Uint8 {
            let scales = q8::scales_len(numel);
            beside.scales = (Some(self.view(Dtype::BFloat16, scales)), Some(self.view(Dtype::BFloat16, scales)));
        }
        let moments = (self.view(layout.codec, moments), self.view(layout.codec, moments));
        let (param, grad) = (self.view(param, numel), self.gradient(layout.grad, numel));
        AdamTensor::new(param, Some(grad), moments, &beside, 0).expect("a valid tensor")
    }
}

fn bytes(view: View) -> u64 {
    (view.numel() * view.dtype().size()) as u64
}

/// What a step moves: the gradient in, everything else in and out, but a weight that is only written.
fn step_bytes(tensor: &AdamTensor) -> u64 {
    let traffic = |(name, view): (&str, View)| if name == "weight_out" { bytes(view) } else { 2 * bytes(view) };
    tensor.written().map(traffic).sum::<u64>() + tensor.grad.map_or(0, bytes)
}

/// Whether every benchmark is only run once, to see that it works.
fn is_test() -> bool {
    let has = |flag: &str| std::env::args().any(|argument| argument == flag);
    has("--test") || !has("--bench")
}

fn sizes() -> [(&'static str, usize); 2] {
    if is_test() {
        [("cached", 1000), ("memory", 2 * CHUNK_LEN)]
    } else {
        [("cached", CACHED_LEN), ("memory", MEMORY_LEN)]
    }
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group
}

fn isa() -> Isa {
    Isa::detect().expect("an ISA")
}

fn steps(criterion: &mut Criterion) {
    let mut group = group(criterion, "step");
    for (place, numel) in sizes() {
        for layout in LAYOUTS {
            let mut arena = Arena::new();
            let tensor = arena.tensor(layout, numel);
            let hyper = Hyper { lr: 1e-4, weight_decay: 0.01, grad_scale: 0.5, ..Hyper::default() };
            let mut count = 0;
            group.throughput(Throughput::Bytes(step_bytes(&tensor)));
            group.bench_function(BenchmarkId::new(layout.name, place), |bencher| {
                bencher.iter(|| {
                    count += 1;
                    // SAFETY: the arena's memory, which outlives the benchmark and is used by this call alone.
                    unsafe { step(arena.pool, isa(), &[tensor], &[count], &hyper) }.expect("a valid step");
                });
            });
        }
    }
}

fn norms(criterion: &mut Criterion) {
    let mut group = group(criterion, "grad_stats");
    for (place, numel) in sizes() {
        for dtype in [Dtype::Float32, Dtype::BFloat16, Dtype::Float16] {
            for with_norm in [false, true] {
                let mut arena = Arena::new();
                let grad = arena.gradient(dtype, numel);
                let name = format!("{dtype} {}", if with_norm { "norm" } else { "finite" });
                group.throughput(Throughput::Bytes(bytes(grad)));
                group.bench_function(BenchmarkId::new(name, place), |bencher| {
                    // SAFETY: as in `steps`.
                    bencher.iter(|| unsafe { grad_stats(arena.pool, isa(), &[grad], with_norm) }.expect("a gradient"));
                });
            }
        }
    }
}

fn fingerprints(criterion: &mut Criterion) {
    let mut group = group(criterion, "fingerprint");
    let numel = sizes()[0].1;
    let values: Vec<Bf16> = (0..numel).map(|index| Bf16(index as u16)).collect();
    group.throughput(Throughput::Bytes(2 * numel as u64));
    group.bench_function("cached", |bencher| bencher.iter(|| isa().run(Fingerprint(black_box(&values)))));
}

fn exchanges(criterion: &mut Criterion) {
    let mut group = group(criterion, "exchange");
    let (place, numel) = sizes()[1];
    for layout in LAYOUTS.into_iter().filter(|layout| matches!(layout.master, Master::Split)) {
        let mut arena = Arena::new();
        let tensor = arena.tensor(layout, numel);
        let moments = (arena.view(Dtype::Float32, numel), arena.view(Dtype::Float32, numel));
        let views = StateViews { master: Some(arena.view(Dtype::Float32, numel)), moments: Some(moments) };
        group.throughput(Throughput::Bytes(
            12 * numel as u64 + tensor.written().map(|(_, view)| bytes(view)).sum::<u64>(),
        ));
        group.bench_function(BenchmarkId::new(format!("read {}", layout.name), place), |bencher| {
            // SAFETY: as in `steps`.
            bencher.iter(|| unsafe { read_state(arena.pool, isa(), &tensor, views) }.expect("a valid read"));
        });
        group.bench_function(BenchmarkId::new(format!("write {}", layout.name), place), |bencher| {
            // SAFETY: as in `steps`.
            bencher.iter(|| unsafe { write_state(arena.pool, isa(), &tensor, 1, views) }.expect("a valid write"));
        });
    }
}

criterion_group!(benches, steps, norms, fingerprints, exchanges);
criterion_main!(benches);
