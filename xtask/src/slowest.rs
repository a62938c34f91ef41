//! Which tests take longest, from the times that the test harness prints.

/// Tests that are named.
const NAMED: usize = 12;

/// Name and seconds in a line such as `test grader::half ... ok <0.012s>`.
pub fn timed(line: &str) -> Option<(&str, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, time) = rest.rsplit_once('<')?;
    Some((name, time.strip_suffix("s>")?.parse().ok()?))
}

/// The slowest of tests given with their seconds, the slowest first; nothing where no times are known.
pub fn list(times: &mut [(f64, String)]) -> String {
    if times.is_empty() {
        return String::new();
    }
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    let lines: String = times.iter().take(NAMED).map(|(s, name)| format!("{s:>9.1} s  {name}\n")).collect();
    format!("\nslowest of {} tests\n{lines}", times.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_the_lines_of_the_harness() {
        assert_eq!(timed("test grader::half ... ok <0.012s>"), Some(("grader::half", 0.012)));
        assert_eq!(timed("test a ... FAILED <1.500s>"), Some(("a", 1.5)));
        for other in ["test a ... ignored", "running 2 tests", "test result: ok. 2 passed <x>", ""] {
            assert_eq!(timed(other), None, "{other}");
        }
    }

    #[test]
    fn the_slowest_come_first() {
        let mut times =
            [(0.5, "a b".to_string()), (12.25, "runs killed".to_string()), (3.0, "x y".to_string())];
        assert_eq!(
            list(&mut times),
            "\nslowest of 3 tests\n     12.2 s  runs killed\n      3.0 s  x y\n      0.5 s  a b\n"
        );
        assert_eq!(list(&mut []), "");
    }
}
