//! Pages to and from host memory in every layout, plain copies, and checksums.

use crate::args;
use crate::compile::Program;
use crate::data::{Random, same};
use crate::emulator::{Checked, Gpu, Grid, Memory};

/// A pool's shape, with keys and values of different widths.
#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    pages: usize,
    heads: usize,
    tokens: usize,
    /// Bytes of one head of one token, keys and values.
    row: [usize; 2],
}

/// Distances in bytes of a plane of the host, from one of each to the next.
#[derive(Clone, Copy)]
struct Strides {
    page: usize,
    layer: usize,
    head: usize,
    token: usize,
}

impl Shape {
    /// The host's layouts: layer first, page first, page first direct, page head.
    fn strides(&self, layout: usize, plane: usize) -> Strides {
        let Shape { layers, pages, heads, tokens, row } = *self;
        let d = row[plane];
        let all = heads * d;
        match layout {
            0 => Strides { page: tokens * all, layer: pages * tokens * all, token: all, head: d },
            1 => Strides { page: tokens * layers * all, layer: all, token: layers * all, head: d },
            2 => Strides { page: layers * tokens * all, layer: tokens * all, token: all, head: d },
            _ => Strides { page: heads * tokens * layers * d, layer: d, token: layers * d, head: tokens * layers * d },
        }
    }

    fn bytes(&self, plane: usize) -> usize {
        self.layers * self.pages * self.heads * self.tokens * self.row[plane]
    }

    fn device_offset(&self, plane: usize, layer: usize, page: usize, head: usize, token: usize) -> usize {
        (((layer * self.pages + page) * self.heads + head) * self.tokens + token) * self.row[plane]
    }

    /// Calls `body` with the device's and the host's offset of each row of a page's layers.
    fn rows(
        &self,
        layout: usize,
        plane: usize,
        (page, host_page): (usize, usize),
        layers: std::ops::Range<usize>,
        mut body: impl FnMut(usize, usize),
    ) {
        let strides = self.strides(layout, plane);
        for layer in layers {
            for head in 0..self.heads {
                for token in 0..self.tokens {
                    let host =
                        host_page * strides.page + layer * strides.layer + head * strides.head + token * strides.token;
                    body(self.device_offset(plane, layer, page, head, token), host);
                }
            }
        }
    }

    fn launch(
        &self,
        gpu: &mut Gpu,
        kernel: &str,
        layout: usize,
        memory: [Memory; 4],
        jobs: &[(usize, usize)],
        layers: std::ops::Range<usize>,
    ) -> Checked {
        let [keys, values, host_k, host_v] = memory;
        let [k, v] = [self.strides(layout, 0), self.strides(layout, 1)];
        let list = gpu.memory(&jobs.iter().flat_map(|(page, _)| [*page as u64, 0, 0]).collect::<Vec<u64>>())?;
        for (i, (_, host_page)) in jobs.iter().enumerate() {
            gpu.point(list, 24 * i as u64 + 8, host_k, (host_page * k.page) as u64)?;
            gpu.point(list, 24 * i as u64 + 16, host_v, (host_page * v.page) as u64)?;
        }
        let layer = |plane| (self.bytes(plane) / self.layers) as u64;
        gpu.launch(
            kernel,
            Grid([jobs.len() as u32, layers.len() as u32, 2], 256, 0),
            args![
                keys,
                values,
                list,
                layers.start as u32,
                self.heads as u32,
                self.tokens as u32,
                self.row[0] as u32,
                self.row[1] as u32,
                layer(0),
                layer(1),
                k.layer as u64,
                k.head as u64,
                k.token as u64,
                v.layer as u64,
                v.head as u64,
                v.token as u64
            ],
        )
    }
}

const SHAPES: [Shape; 3] = [
    Shape { layers: 3, pages: 5, heads: 2, tokens: 4, row: [32, 48] },
    Shape { layers: 2, pages: 4, heads: 3, tokens: 7, row: [20, 12] },
    Shape { layers: 2, pages: 3, heads: 1, tokens: 1, row: [6, 2] },
];

/// Some pages go out and come back, all layers and single ones, and no other byte changes.
pub fn copies(program: &Program) -> Checked {
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for layout in 0..4 {
            let mut random = Random::new(index as u64);
            let device = [0, 1].map(|plane| random.bytes(shape.bytes(plane)));
            let jobs = [(2, 0), (0, shape.pages - 1)];
            for (kernel, layers) in [("kv_pages_out", 0..shape.layers), ("kv_pages_in", 1..2), ("kv_pages_out", 1..2)] {
                let out = kernel == "kv_pages_out";
                let host = [0, 1].map(|plane| random.bytes(shape.bytes(plane)));
                let mut gpu = Gpu::new(program, layout as u64);
                let memory =
                    [gpu.memory(&device[0])?, gpu.memory(&device[1])?, gpu.memory(&host[0])?, gpu.memory(&host[1])?];
                shape.launch(&mut gpu, kernel, layout, memory, &jobs, layers.clone())?;
                for plane in 0..2 {
                    let (mut want_device, mut want_host) = (device[plane].clone(), host[plane].clone());
                    for job in jobs {
                        shape.rows(layout, plane, job, layers.clone(), |here, there| {
                            let row = shape.row[plane];
                            if out {
                                want_host[there..there + row].copy_from_slice(&device[plane][here..here + row]);
                            } else {
                                want_device[here..here + row].copy_from_slice(&host[plane][there..there + row]);
                            }
                        });
                    }
                    let what = |side: &str| format!("{kernel}, layout {layout}, shape {index}, plane {plane}: {side}");
                    same(&what("device"), &gpu.read(memory[plane])?, &want_device)?;
                    same(&what("host"), &gpu.read(memory[2 + plane])?, &want_host)?;
                }
            }
        }
    }
    Ok(())
}

/// Copies and zeros of any length and place, in any number of pieces.
pub fn bytes(program: &Program) -> Checked {
    for pieces in [1, 3] {
        let mut random = Random::new(pieces);
        let from = random.bytes(6000);
        let into = random.bytes(6000);
        let mut gpu = Gpu::new(program, 3);
        let (source, target) = (gpu.memory(&from)?, gpu.memory(&into)?);
        let jobs = [(0, 16, 4096), (4097, 3, 1), (4100, 1000, 17), (4128, 4128, 1000), (5200, 0, 0)];
        let list = gpu.memory(&jobs.iter().flat_map(|(_, _, n)| [0, 0, *n as u64]).collect::<Vec<u64>>())?;
        for (i, (to, at, _)) in jobs.iter().enumerate() {
            gpu.point(list, 24 * i as u64, target, *to as u64)?;
            gpu.point(list, 24 * i as u64 + 8, source, *at as u64)?;
        }
        gpu.launch("bytes_copy", Grid([jobs.len() as u32, pieces as u32, 1], 256, 0), args![list])?;
        let mut want = into.clone();
        for (to, at, n) in jobs {
            want[to..to + n].copy_from_slice(&from[at..at + n]);
        }
        same("bytes_copy", &gpu.read(target)?, &want)?;
        let zeros = [(16, 333), (1001, 5), (2048, 512)];
        let list = gpu.memory(&zeros.iter().flat_map(|(_, n)| [0, *n as u64]).collect::<Vec<u64>>())?;
        for (i, (at, _)) in zeros.iter().enumerate() {
            gpu.point(list, 16 * i as u64, target, *at as u64)?;
        }
        gpu.launch("bytes_zero", Grid([zeros.len() as u32, pieces as u32, 1], 256, 0), args![list])?;
        for (at, n) in zeros {
            want[at..at + n].fill(0);
        }
        same("bytes_zero", &gpu.read(target)?, &want)?;
    }
    Ok(())
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: impl IntoIterator<Item = u8>) -> u32 {
    !bytes.into_iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82F6_3B78 } else { crc >> 1 })
    })
}

/// Checksums of pages, as their seals have them.
pub fn checksums(program: &Program) -> Checked {
    assert_eq!(crc32c(*b"123456789"), 0xE306_9283);
    let large = Shape { layers: 2, pages: 4, heads: 5, tokens: 64, row: [24, 16] };
    for (index, shape) in SHAPES.into_iter().chain([large]).enumerate() {
        for head_major in [false, true] {
            let mut random = Random::new(index as u64 + 40);
            let device = [0, 1].map(|plane| random.bytes(shape.bytes(plane)));
            let pages = [1u32, 0];
            let components = 2 * shape.layers;
            let checksum = |plane: usize, layer: usize, page: usize| {
                let row = |head, token| shape.device_offset(plane, layer, page, head, token);
                let order: Vec<usize> = if head_major {
                    (0..shape.heads)
                        .flat_map(|h| (0..shape.tokens).map(move |t| (h, t)))
                        .map(|(h, t)| row(h, t))
                        .collect()
                } else {
                    (0..shape.tokens)
                        .flat_map(|t| (0..shape.heads).map(move |h| (h, t)))
                        .map(|(h, t)| row(h, t))
                        .collect()
                };
                crc32c(order.iter().flat_map(|at| device[plane][*at..*at + shape.row[plane]].to_vec()))
            };
            let sums: Vec<Vec<u32>> = pages
                .iter()
                .map(|page| {
                    let of = |plane| (0..shape.layers).map(move |layer| (plane, layer));
                    of(0).chain(of(1)).map(|(plane, layer)| checksum(plane, layer, *page as usize)).collect()
                })
                .collect();

            let mut gpu = Gpu::new(program, index as u64);
            let (k, v, list) = (gpu.memory(&device[0])?, gpu.memory(&device[1])?, gpu.memory(&pages)?);
            let checksums = gpu.memory(&vec![0xEEEE_EEEEu32; pages.len() * components])?;
            let layer = |plane| (shape.bytes(plane) / shape.layers) as u64;
            let n = pages.len() as u32;
            gpu.launch(
                "seal_checksums",
                Grid([n, shape.layers as u32, 2], 256, 0),
                args![
                    k,
                    v,
                    list,
                    checksums,
                    shape.heads as u32,
                    shape.tokens as u32,
                    shape.row[0] as u32,
                    shape.row[1] as u32,
                    layer(0),
                    layer(1),
                    u32::from(head_major)
                ],
            )?;
            same("checksums", &gpu.read(checksums)?, &sums.concat())?;
        }
    }
    Ok(())
}

#[test]
fn pages_go_out_and_come_back_in_every_layout() {
    copies(&Program::of("page_copy.cu", &[])).unwrap();
}

#[test]
fn bytes_are_copied_and_cleared() {
    bytes(&Program::of("page_copy.cu", &[])).unwrap();
}

#[test]
fn checksums_are_those_of_the_host() {
    checksums(&Program::of("seal.cu", &[])).unwrap();
}
