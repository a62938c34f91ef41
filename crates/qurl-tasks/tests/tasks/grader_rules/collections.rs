//! Sets, tuples, intervals and matrices.

use super::check;

#[test]
fn sets_tuples_intervals() {
    check(
        &[
            ("1,2,3", "3, 2, 1"),
            ("1,2,3", "\\{1,2,3\\}"),
            ("1,2,3", "{1, 2, 3}"),
            ("1,2,3", "1, 2 and 3"),
            ("1,2,3", "1,2,\\text{ and }3"),
            ("1,2,3", "1; 2; 3"),
            ("\\{1,2\\}", "\\{2,1,1\\}"),
            ("\\left\\{1,2\\right\\}", "\\{2,1\\}"),
            ("\\{5\\}", "5"),
            ("1,000,2,000", "1,000,2,000"),
            ("100,200,300", "100, 200, 300"),
            ("3\\pm2\\sqrt2", "3+2\\sqrt2, 3-2\\sqrt2"),
            ("\\pm 2", "2,-2"),
            ("\\pm 2", "\\{-2,2\\}"),
            ("\\{1\\pm\\sqrt5,-2\\}", "-2,1+\\sqrt5,1-\\sqrt5"),
            ("(1,2)", "\\left(1,2\\right)"),
            ("(1,2)", "( 1 , 2 )"),
            ("(1,2)", "(\\frac22, 2.0)"),
            ("(3, \\frac{\\pi}{2})", "(3,\\pi/2)"),
            ("(1,2,3)", "[1,2,3]"),
            ("(1,2,3)", "\\langle 1,2,3\\rangle"),
            ("(1,2),(3,4)", "(3,4),(1,2)"),
            ("(1,2),(3,4)", "\\{(3,4),(1,2)\\}"),
            ("(1,2),(3,4)", "(3,4) \\text{ and } (1,2)"),
            ("(-4, 27);(2, 15)", "(2,15),(-4,27)"),
            ("[0,1)", "\\left[0,1\\right)"),
            ("(-\\infty,3]", "(-∞,3]"),
            ("(-\\infty,1)\\cup(2,3)", "(2,3)\\cup(-\\infty,1)"),
            ("(0,2)\\cup[1,3]", "(0,3]"),
            ("(0,1)\\cup\\{1\\}", "(0,1]"),
            ("\\mathbb{R}\\setminus\\{2\\}", "(-\\infty,2)\\cup(2,\\infty)"),
            ("\\mathbb{R}", "(-\\infty,\\infty)"),
            ("\\emptyset", "\\{\\}"),
            ("\\emptyset", "\\varnothing"),
            ("[\\frac12, 8]", "[0.5,8]"),
            ("[0,5]\\cap[3,8]", "[3,5]"),
            ("1:2", "2:4"),
            ("1:2", "1/2"),
            ("3:4:5", "6:8:10"),
            ("(6,235^\\circ)", "(6,235)"),
            ("1,i,-i", "-i,i,1"),
            ("\\text{B,C}", "B, C"),
            ("5,\\,-11", "-11,5"),
        ],
        &[
            ("1,2,3", "1,2"),
            ("1,2,3", "1,2,4"),
            ("(1,2)", "(2,1)"),
            ("(1,2)", "\\{1,2\\}"),
            ("(1,2)", "[1,2]"),
            ("[0,1)", "(0,1)"),
            ("[0,1)", "[0,1]"),
            ("[0,1)", "[0,2)"),
            ("(0,1)\\cup(1,2)", "(0,2)"),
            ("\\pm2", "2"),
            ("\\pm2", "-2"),
            ("(1,2,3)", "(1,2)"),
            ("1:2", "2:1"),
            ("12:00", "1:00"),
            ("12:30", "12:45"),
            ("(1,2),(3,4)", "(1,2)"),
            ("(1,2),(3,4)", "(1,3),(2,4)"),
            ("\\mathbb{R}", "\\mathbb{Z}"),
            ("3,5", "35"),
        ],
    );
}

#[test]
fn matrices() {
    check(
        &[
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}"),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
                "\\left(\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right)",
            ),
            ("\\begin{pmatrix}1/2\\\\3\\end{pmatrix}", "\\begin{pmatrix}\\frac12\\\\3\\end{pmatrix}"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)"),
            ("\\begin{pmatrix}2&4\\end{pmatrix}", "2\\begin{pmatrix}1&2\\end{pmatrix}"),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}+\\begin{pmatrix}1&1\\\\1&1\\end{pmatrix}",
                "\\begin{pmatrix}2&3\\\\4&5\\end{pmatrix}",
            ),
            (
                "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}\\begin{pmatrix}0&1\\\\1&0\\end{pmatrix}",
                "\\begin{pmatrix}2&1\\\\4&3\\end{pmatrix}",
            ),
            ("\\begin{pmatrix}1\\\\2\\\\\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ],
        &[
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
            ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\\\3\\end{pmatrix}"),
            ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(2,1)"),
            ("\\begin{pmatrix}1\\end{pmatrix}", "2"),
        ],
    );
}
