//! Every instruction set of the machine against the portable one, operation by operation.

use super::*;

/// Runs every operation on given inputs and returns all results, lane by lane, as bits.
struct AllOps<'a> {
    a: &'a [f32; LANES],
    b: &'a [f32; LANES],
    c: &'a [f32; LANES],
    words: &'a [u32; LANES],
    high: &'a [u32; LANES],
}

impl Kernel for AllOps<'_> {
    type Output = Vec<(String, [u32; LANES])>;

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) -> Self::Output {
        let mut out = Vec::new();
        let mut push = |name: String, v: [f32; LANES]| out.push((name, v.map(f32::to_bits)));
        // SAFETY: all pointers are to arrays of 16 elements of the right type or larger ones.
        unsafe {
            let (a, b, c) = (s.load(self.a.as_ptr()), s.load(self.b.as_ptr()), s.load(self.c.as_ptr()));
            push("fma".into(), s.to_array(s.fma(a, b, c)));
            push("add".into(), s.to_array(s.add(a, b)));
            push("sub".into(), s.to_array(s.sub(a, b)));
            push("mul".into(), s.to_array(s.mul(a, b)));
            push("div".into(), s.to_array(s.div(a, b)));
            push("max".into(), s.to_array(s.max(a, b)));
            push("min".into(), s.to_array(s.min(a, b)));
            push("sum".into(), [s.sum(a); LANES]);
            push("greatest".into(), [s.greatest(a); LANES]);
            push("splat".into(), s.to_array(s.splat(self.a[3])));
            for n in 0..=LANES {
                push(format!("first {n}"), s.to_array(s.first(n, a, b)));
            }
            let words = s.load_u32(self.words.as_ptr());
            let high = s.load_u32(self.high.as_ptr());
            push("to_float".into(), s.to_array(s.to_float(words)));
            push("u8".into(), s.to_array(s.to_float(s.load_u8(self.words.as_ptr().cast()))));
            push("i8".into(), s.to_array(s.to_float(s.load_i8(self.words.as_ptr().cast()))));
            push("bf16".into(), s.to_array(s.load_bf16(self.words.as_ptr().cast())));
            for j in 0..8 {
                push(format!("nibble {j}"), s.to_array(s.nibble(words, 4 * j)));
                for k in 0..4 {
                    let bit = j + 8 * k;
                    push(format!("5 bits {j} {bit}"), s.to_array(s.nibble_and_1(words, 4 * j, high, bit)));
                }
                for k in 0..2 {
                    let bit = 2 * j + 16 * k;
                    push(format!("6 bits {j} {bit}"), s.to_array(s.nibble_and_2(words, 4 * j, high, bit)));
                }
            }
            let ints = |v: S::I| {
                let mut out = [0; LANES];
                s.store_int(out.as_mut_ptr(), v);
                out.map(f32::from_bits)
            };
            push("splat_int".into(), ints(s.splat_int(-7)));
            push("add_int".into(), ints(s.add_int(words, high)));
            push("and_int".into(), ints(s.and_int(words, high)));
            push("max_int".into(), ints(s.max_int(words, high)));
            for shift in [0, 1, 12, 31] {
                push(format!("left {shift}"), ints(s.shift_left(words, shift)));
                push(format!("right {shift}"), ints(s.shift_right(words, shift)));
            }
            push("bits".into(), ints(s.bits(a)));
            push("to_int".into(), ints(s.to_int(s.mul(a, s.splat(2.5)))));
            push("part_lanes".into(), ints(s.part_lanes(words)));
            push("sum_int".into(), ints(s.splat_int(s.sum_int(s.shift_right(words, 4)))));
            push("greatest_int".into(), ints(s.splat_int(s.greatest_int(words))));
            let mut bytes = [0u8; 4 * LANES];
            s.store_bytes(bytes.as_mut_ptr().add(3), words);
            push("store_bytes".into(), s.to_array(s.load(bytes.as_ptr().cast())));
            for n in (-126i32..=127).step_by(16) {
                let magic: [f32; LANES] = std::array::from_fn(|l| (n + l as i32).min(127) as f32 + 12_582_912.0);
                push(format!("pow2 {n}"), s.to_array(s.pow2_of_rounded(s.load(magic.as_ptr()))));
            }
        }
        out
    }
}

/// Sums of nibbles and integers for one, two and three rows.
struct NibbleSums<'a> {
    words: &'a [u32; 4 * LANES],
    rows: &'a [[i8; DIGITS]; 3],
}

impl Kernel for NibbleSums<'_> {
    type Output = Vec<[u32; LANES]>;

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) -> Self::Output {
        let rows = self.rows.each_ref().map(|row| row.as_ptr().cast::<u8>());
        let words = self.words.as_ptr().cast();
        let mut out = Vec::new();
        // SAFETY: words and digits are whole, and each array has room for 16 integers.
        unsafe {
            let (one, two, three) =
                (s.nibble_sums(words, [rows[0]]), s.nibble_sums(words, [rows[0], rows[1]]), s.nibble_sums(words, rows));
            for sum in one.into_iter().chain(two).chain(three) {
                let mut lanes = [0; LANES];
                s.store_int(lanes.as_mut_ptr(), sum);
                out.push(lanes);
            }
        }
        out
    }
}

#[test]
fn sums_of_nibbles_are_exact_up_to_the_greatest() {
    let element = |group: usize, j: usize| 8 * (group / 2) + group % 2 + 2 * j;
    let mut random = 1u32;
    let mut next = move || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        random >> 8
    };
    for case in 0..40 {
        let words: [u32; 4 * LANES] =
            std::array::from_fn(|_| if case < 4 { u32::MAX } else { next() ^ next().rotate_left(8) });
        // The greatest integers of either sign, and others.
        let q: [[i32; 32]; 3] = std::array::from_fn(|_| {
            std::array::from_fn(|_| match case {
                0 => 1 << 22,
                1 => -(1 << 22),
                2 => -0x8080,
                3 => 0x7F7F,
                _ => next() as i32 % (1 << 23) - (1 << 22),
            })
        });
        let rows = q.map(|q| {
            let mut digits = [0i8; DIGITS];
            for (group, j) in (0..GROUPS).flat_map(|group| (0..4).map(move |j| (group, j))) {
                let mut rest = q[element(group, j)];
                for place in [2, 1, 0] {
                    digits[(place * GROUPS + group) * 4 + j] = rest as i8;
                    rest = (rest - i32::from(rest as i8)) / 256;
                }
            }
            digits
        });
        let expected: Vec<[u32; LANES]> = [0, 0, 1, 0, 1, 2]
            .into_iter()
            .map(|row: usize| {
                std::array::from_fn(|lane| {
                    let nibble = |k: usize| i64::from(words[k / 8 * LANES + lane] >> (4 * (k % 8)) & 15);
                    (0..32).map(|k| nibble(k) * i64::from(q[row][k])).sum::<i64>() as u32
                })
            })
            .collect();
        for (isa, machine) in machines() {
            let got = machine.run(NibbleSums { words: &words, rows: &rows });
            assert_eq!(got, expected, "{} case {case}", isa.name());
            let got = machine.run_on_bytes(NibbleSums { words: &words, rows: &rows });
            assert_eq!(got, expected, "{} case {case}, on bytes", isa.name());
        }
    }
}

/// All 65,536 half precision numbers.
struct AllHalves;

impl Kernel for AllHalves {
    type Output = Vec<f32>;

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) -> Vec<f32> {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let mut out = Vec::new();
        for chunk in bits.chunks_exact(LANES) {
            // SAFETY: the chunk has 16 elements.
            out.extend(s.to_array(unsafe { s.load_f16(chunk.as_ptr()) }));
        }
        out
    }
}

fn numbers(seed: u32) -> [f32; LANES] {
    let mut x = seed;
    std::array::from_fn(|_| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / 1_000_000.0 - 8.0
    })
}

fn machines() -> Vec<(Isa, Machine)> {
    Isa::available().into_iter().map(|isa| (isa, Machine::new(isa).unwrap())).collect()
}

#[test]
fn every_instruction_set_gives_the_portable_bits() {
    for seed in 0..50 {
        let (a, b, c) = (numbers(seed), numbers(seed + 1000), numbers(seed + 2000));
        let words = numbers(seed + 3000).map(|x| x.to_bits().rotate_left(9) ^ x.to_bits());
        let high = numbers(seed + 4000).map(|x| x.to_bits().rotate_left(5) ^ x.to_bits());
        let ops = || AllOps { a: &a, b: &b, c: &c, words: &words, high: &high };
        let expected = Portable.run(ops());
        for (isa, machine) in machines() {
            for (e, got) in expected.iter().zip(machine.run(ops())) {
                assert_eq!(*e, got, "{} seed {seed}", isa.name());
            }
        }
    }
}

#[test]
fn half_precision_is_widened_exactly() {
    for (isa, machine) in machines() {
        for (bits, x) in (0..=u16::MAX).zip(machine.run(AllHalves)) {
            let expected = half::f16::from_bits(bits).to_f32();
            assert!(
                x == expected || (x.is_nan() && expected.is_nan()),
                "{} {bits:#06x}: {x} for {expected}",
                isa.name()
            );
        }
    }
}

#[test]
fn portable_operations_are_what_their_names_say() {
    let p = Portable;
    let v: [f32; LANES] = std::array::from_fn(|l| l as f32);
    assert_eq!(p.sum(v), 120.0);
    assert_eq!(p.greatest(v), 15.0);
    assert_eq!(p.nibble([0x7654_3210; LANES], 20)[0], 5.0);
    assert_eq!(p.nibble_and_1([0xA; LANES], 0, [0x20; LANES], 5)[0], 26.0);
    assert_eq!(p.nibble_and_2([0xA0; LANES], 4, [0x30; LANES], 4)[0], 58.0);
    assert_eq!(p.pow2_of_rounded([12_582_912.0 - 3.0; LANES])[0], 0.125);
    assert_eq!(p.first(3, [1.0; LANES], [2.0; LANES])[2..4], [1.0, 2.0]);
}
