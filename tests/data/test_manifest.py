"""Images that a CSV file lists."""

import pytest
from images import make_image_folder

from stam.data import open_for_evaluation, open_scenes
from stam.data.manifest import read_manifest
from stam.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_image_folder(tmp_path_factory.mktemp("data") / "images", classes=2)


def listed(folder, name="list.csv", separator=",", split=True):
    """Writes a list of all images of a folder, and returns its path."""
    path = folder.parent / name
    rows = [("path", "label", "split", "note") if split else ("path", "label")]
    for image in sorted(folder.rglob("*.png")):
        part, label, _ = image.relative_to(folder).parts
        here = str(image.relative_to(folder.parent))
        rows.append((here, label, part, "1") if split else (here, label))
    path.write_text("\ufeff" + "".join(separator.join(row) + "\r\n" for row in rows))
    return path


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")])
def test_a_list_holds_the_images_of_its_folder(folder, name, separator):
    listing, direct = open_scenes(listed(folder, name, separator)), open_scenes(folder)
    for part in ("train", "val"):
        one, other = getattr(listing, part), getattr(direct, part)
        assert one.classes == other.classes == ("class0", "class1")
        assert one.labels.tolist() == other.labels.tolist() and len(one) > 0
        assert all((one.load(index) == other.load(index)).all() for index in range(len(one)))


def test_a_list_without_a_split_gets_one_that_is_recorded(folder):
    path = listed(folder, "flat.csv", split=False)
    first = open_scenes(path, seed=3)
    assert first.record.seed == 3 and len(first.val) == 2
    again = open_scenes(path, record=first.record)
    assert again.record == first.record and again.val.names == first.val.names
    everything = open_for_evaluation(path, ("class1", "class0", "other"))
    assert len(everything) == 18 and set(everything.labels.tolist()) == {0, 1}


def test_paths_may_be_absolute_and_labels_missing(folder, tmp_path):
    image = next(folder.rglob("*.png"))
    (tmp_path / "list.csv").write_text(f"path\n{image}\n")
    (row,) = read_manifest(tmp_path / "list.csv")
    assert row.path == str(image) and row.label == row.split == "" and row.line == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must name the columns 'path', 'label'"),
        ("a.png,cat\n", "must name the columns .*it is 'a.png,cat'"),
        ("path,label\n", "no images in .*list.csv"),
        ("path,label\n{image},a\n,b\n", "line 3 of .*list.csv has no path"),
        ("path,label\n{image},a\nb.png,\n", "line 3 of .*list.csv has no label"),
        ('path,label\n{image},"a\nb"\n', "line 3 of .*list.csv has characters that cannot be shown"),
        ("path\n{image}\n", "line 2 of .*list.csv has no label"),
        ("path,label\n{image},a\nb.png,a\n{image},b\n", "lines 2 and 4 of .* name the same image"),
        ("path,label\nx/../b.png,a\n./b.png,b\n", "lines 2 and 3 of .* name the same image"),
        (
            "path,label,split\n{image},a,val\nb.png,a,validation\n{image}/../c.png,a,train\nd.png,b,train\n",
            "some images are of the part 'val', others of 'validation': call both 'val'",
        ),
        ("path,label,split\n{image},a,trian\n", "line 2 of .*split 'trian' is unknown: did you mean 'train'"),
        ("path,label\nnowhere.png,a\n", "no image at .*nowhere.png, the first in .*paths start from"),
        ("path,label\n{image},a\nb.png,a\n", "one class only"),
    ],
)
def test_mistakes_name_the_line(folder, tmp_path, text, said):
    (tmp_path / "list.csv").write_text(text.format(image=next(folder.rglob("*.png"))))
    with pytest.raises(DataError, match=said):
        open_scenes(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_bytes(b"path,label\n\xff\xfe,a\n")
    with pytest.raises(DataError, match="cannot read"):
        open_scenes(tmp_path / "list.csv")
