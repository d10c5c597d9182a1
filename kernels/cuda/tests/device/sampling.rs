//! Tokens that the device chooses.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::{Device, SampleRow, Sampled};

use super::rig::Rig;

const GREEDY: SampleRow<'static> = SampleRow {
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    uniform: 0.0,
    penalties: [0.0, 0.0, 1.0],
    counts: &[],
    biases: &[],
};

#[test]
fn each_row_is_chosen_by_its_own_parameters() {
    let rig = Rig::computing(Arithmetic::Fast);
    let none = f32::NEG_INFINITY;
    let rows: [([f32; 5], SampleRow<'_>, Sampled); 10] = [
        ([0.0, 3.0, 1.0, 3.0, 2.0], GREEDY, Sampled::Token(1)),
        ([0.0, 3.0, 1.0, 2.0, 2.5], SampleRow { biases: &[(1, none)], ..GREEDY }, Sampled::Token(4)),
        ([0.0, 3.0, 1.0, 2.0, 2.5], SampleRow { biases: &[(0, 4.0)], ..GREEDY }, Sampled::Token(0)),
        (
            [0.0, 3.0, 1.0, 2.0, 2.5],
            SampleRow { penalties: [0.5, 0.25, 1.0], counts: &[(1, 1), (4, 2)], ..GREEDY },
            Sampled::Token(1),
        ),
        (
            [0.0, 3.0, 1.0, 2.0, 2.5],
            SampleRow { penalties: [0.5, 0.25, 2.0], counts: &[(1, 1), (4, 2)], ..GREEDY },
            Sampled::Token(3),
        ),
        ([0.0, f32::NAN, 1.0, 2.0, 2.5], GREEDY, Sampled::NotANumber),
        ([none; 5], SampleRow { temperature: 1.0, ..GREEDY }, Sampled::NothingLeft),
        // Of equal weights the draw falls on the token whose share of the unit interval it is in.
        ([1.0; 5], SampleRow { temperature: 1.0, uniform: 0.5, ..GREEDY }, Sampled::Token(2)),
        (
            [1.0, 1.0, 9.0, 1.0, 9.0],
            SampleRow { temperature: 1.0, top_k: 2, uniform: 0.9, ..GREEDY },
            Sampled::Token(4),
        ),
        (
            [1.0, 1.0, 9.0, 1.0, 9.0],
            SampleRow { temperature: 1.0, min_p: 0.5, uniform: 0.2, ..GREEDY },
            Sampled::Token(2),
        ),
    ];
    let logits: Vec<f32> = rows.iter().flat_map(|(logits, ..)| *logits).collect();
    let mut buf = rig.device.upload(&logits).unwrap();
    let told: Vec<SampleRow<'_>> = rows.iter().map(|(_, row, _)| *row).collect();
    let expected: Vec<Sampled> = rows.iter().map(|(_, _, sampled)| *sampled).collect();
    assert!(rig.device.samples());
    assert_eq!(rig.device.sample(&mut buf, 5, &told).unwrap(), expected);
    let error = rig.device.sample(&mut buf, 5, &[SampleRow { biases: &[(5, 1.0)], ..GREEDY }]).unwrap_err();
    assert!(error.to_string().contains("index 5"), "{error}");
    assert!(rig.device.sample(&mut buf, 50, &[GREEDY; 2]).is_err(), "rows that are not there");
    assert_eq!(rig.device.sample(&mut buf, 5, &[]).unwrap(), []);
    drop(buf);
    rig.end();
}
