//! How much memory this process may still take.

use std::path::Path;

/// Bytes that can be had without swapping, by the machine and by the limits of the container (cgroup 2 or 1)
/// that this process is in; none where the system does not say.
pub fn available_memory() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| field(&text, "MemAvailable:").map(|kib| kib << 10));
    let group = read("/proc/self/cgroup").and_then(|text| of_groups(&text, &read));
    [machine, group].into_iter().flatten().min()
}

/// The least that one of the groups of a process, or one above, leaves.
fn of_groups(own: &str, read: &impl Fn(&str) -> Option<String>) -> Option<u64> {
    let mut least = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else { continue };
        let (root, files) = match controllers {
            "" => ("/sys/fs/cgroup", ["memory.max", "memory.current"]),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => continue,
        };
        // Inside of a container its own group may be shown as the root.
        for group in Path::new(group.trim_start_matches('/')).ancestors() {
            let file = |name: &str| read(&Path::new(root).join(group).join(name).to_string_lossy());
            let number = |name: &str| file(name)?.trim().parse::<u64>().ok();
            let Some((max, used)) = number(files[0]).zip(number(files[1])) else { continue };
            // Files that were read are counted, too, and given up when memory is wanted.
            let cache = file("memory.stat").and_then(|text| field(&text, "inactive_file")).unwrap_or(0);
            let free = max.saturating_sub(used.saturating_sub(cache));
            least = Some(least.map_or(free, |least: u64| least.min(free)));
        }
    }
    least
}

/// The number after a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix([' ', '\t']))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_counts() {
        let files = |path: &str| {
            let text = match path {
                "/sys/fs/cgroup/a/b/memory.max" => "max",
                "/sys/fs/cgroup/a/b/memory.current" => "1000",
                "/sys/fs/cgroup/a/memory.max" => "5000\n",
                "/sys/fs/cgroup/a/memory.current" => "3000\n",
                "/sys/fs/cgroup/a/memory.stat" => "anon 2000\ninactive_file 700\n",
                "/sys/fs/cgroup/memory/old/memory.limit_in_bytes" => "900",
                "/sys/fs/cgroup/memory/old/memory.usage_in_bytes" => "1000",
                _ => return None,
            };
            Some(text.to_string())
        };
        assert_eq!(of_groups("0::/a/b\n", &files), Some(2700));
        assert_eq!(of_groups("3:cpu:/x\n2:cpuset,memory:/old\n", &files), Some(0));
        assert_eq!(of_groups("0::/elsewhere\n", &files), None);
        assert_eq!(field("MemTotal: 5 kB\nMemAvailable:   17 kB\n", "MemAvailable:"), Some(17));
        assert!(available_memory().is_none_or(|bytes| bytes > 0));
    }
}
