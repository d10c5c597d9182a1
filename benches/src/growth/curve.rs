//! How something grows with the pages that are cached.

use serde::Serialize;

/// Values by number of pages.
#[derive(Clone, Debug, Serialize)]
pub struct Curve {
    /// What it is.
    pub name: String,
    /// Its unit.
    pub unit: &'static str,
    /// Pages and value.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// Without points.
    pub fn new(name: impl Into<String>, unit: &'static str) -> Self {
        Self { name: name.into(), unit, points: Vec::new() }
    }

    /// The power of the pages that the value grows with: the slope of the straight line that fits best where both axes are logarithmic.
    /// None with fewer than two points that have a logarithm.
    pub fn exponent(&self) -> Option<f64> {
        let logs: Vec<(f64, f64)> =
            self.points.iter().filter(|(x, y)| *x > 0.0 && *y > 0.0).map(|(x, y)| (x.ln(), y.ln())).collect();
        let count = logs.len() as f64;
        let mean = |value: fn(&(f64, f64)) -> f64| logs.iter().map(value).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = logs.iter().map(|point| (point.0 - x).powi(2)).sum();
        (spread > 0.0).then(|| logs.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread)
    }

    /// The exponent in words.
    pub fn words(&self) -> String {
        let Some(exponent) = self.exponent() else {
            return "was measured at too few sizes to say how it grows".to_owned();
        };
        let tenfold = 10f64.powf(exponent);
        match exponent {
            e if e.abs() < 0.05 => format!("does not grow with the pages (exponent {exponent:.2})"),
            e if e < 0.0 => format!(
                "falls as the pages to the power {exponent:.2}: with ten times the pages it is {tenfold:.2} times as much"
            ),
            e if e > 0.95 && e < 1.05 => format!("grows in proportion to the pages (exponent {exponent:.2})"),
            e if e < 1.0 => format!(
                "grows slower than the pages, as their power {exponent:.2}: with ten times the pages it is {tenfold:.2} times as much"
            ),
            _ => format!(
                "grows faster than the pages, as their power {exponent:.2}: with ten times the pages it is {tenfold:.1} times as much"
            ),
        }
    }
}

/// The middle value; 0 without values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn power(exponent: f64) -> Curve {
        let mut curve = Curve::new("a curve", "us");
        curve.points = (3..=7).map(|power| 10f64.powi(power)).map(|x| (x, 5.0 * x.powf(exponent))).collect();
        curve
    }

    #[test]
    fn the_exponent_of_a_power_is_found() {
        for exponent in [-0.5, 0.0, 0.3, 1.0, 2.0] {
            assert!((power(exponent).exponent().unwrap() - exponent).abs() < 1e-9);
        }
        let mut one = power(1.0);
        one.points.truncate(1);
        assert_eq!(one.exponent(), None);
        assert_eq!(Curve::new("none", "B").exponent(), None);
    }

    #[test]
    fn the_words_say_the_kind_of_growth() {
        let starts = [
            (-0.5, "falls"),
            (0.0, "does not grow"),
            (0.3, "grows slower"),
            (1.0, "grows in prop"),
            (2.0, "grows fast"),
        ];
        for (exponent, start) in starts {
            let words = power(exponent).words();
            assert!(words.starts_with(start), "{exponent}: {words}");
        }
    }
}
